"""Quantized weights: how they are stored, the config that describes them, and linears that keep them packed in memory."""
