"""Kernels that find n-grams and items of evaluation sets in texts."""
