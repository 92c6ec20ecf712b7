"""Kernels over bytes and words: numpy arrays in, numpy arrays out; no specs and no artifacts."""
