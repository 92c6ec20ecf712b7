"""Kernels of edits: which spans to cut, and cutting them."""
