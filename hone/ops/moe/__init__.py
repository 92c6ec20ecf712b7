"""Mixtures of experts: sort tokens by expert, multiply each expert's tokens with its weights, restore the order."""
