"""Linears whose own weights are frozen, alone and with LoRA factors, in training; and those of many adapters in serving."""
