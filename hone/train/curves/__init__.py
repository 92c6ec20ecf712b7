"""Curves of a running training: each writer shows the same scalars somewhere else. One file per writer."""
