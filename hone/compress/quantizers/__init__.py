"""Quantizers: the storage of a matrix as codes and scales. One file a technique."""
