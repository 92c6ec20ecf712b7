"""Optimizers: what they share, and a file for each."""
