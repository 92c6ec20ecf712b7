"""Quantized weights: their storage schemes, the quantization config, and linears that keep weights packed in memory."""
