"""Triton twins of the ops: portable GPU kernels, imported only when chosen."""
