"""Linears whose own weights are frozen, alone and with LoRA factors: `frozen_linear`, `lora_linear`."""
