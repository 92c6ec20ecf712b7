"""Mixtures of experts: sort tokens by expert, one product an expert, and back."""
