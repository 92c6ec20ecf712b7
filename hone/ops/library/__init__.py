"""Kernels of the vendor's libraries behind the signatures of hone's own."""
