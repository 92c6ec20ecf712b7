"""Data parallelism: every rank computes a part of each batch; what of the training's state each rank holds."""
