"""Weights that do not fit a GPU: they stay in pinned host memory, and two buffers on the device hold a layer's at a time."""
