"""Softmax attention under any mask: `attend`, `merge`."""
