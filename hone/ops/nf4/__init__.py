"""Weights as 4-bit indices into a table (NF4, FP4): `dequantize_nf4`."""
