"""Solvers: what several techniques minimize, on tensors alone; grids come from `hone.ops.rounding`."""
