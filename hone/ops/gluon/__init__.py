"""Gluon twins of the ops: Hopper kernels with explicit asynchrony, imported only when chosen."""
