"""Optimizers. One file per optimizer."""
