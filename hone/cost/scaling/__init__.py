"""Scaling laws: the loss of a size and a number of tokens, and the size that is cheapest to train and to serve."""
