"""Linears whose own weights are frozen, alone and with the factors of LoRA and DoRA, in training; and those of many adapters in serving."""
