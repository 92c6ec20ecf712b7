"""Mixtures: the share of each source in a model's training. One file per method."""
