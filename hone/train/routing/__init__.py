"""Mixtures of experts in training: how busy experts are, and the biases that follow from it."""
