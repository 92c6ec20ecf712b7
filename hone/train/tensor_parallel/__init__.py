"""Tensor and sequence parallelism of a training: each rank computes a part of every layer."""
