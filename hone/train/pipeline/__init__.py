"""Pipeline parallelism of a training: each rank computes some of the layers, for one micro-batch after another."""
