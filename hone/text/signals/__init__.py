"""Kernels that count, in one pass over a document, what signals are made of."""
