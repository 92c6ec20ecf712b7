"""Collectives in readable form, over messages between two ranks: rings, trees, halving, pairs, and inside before between."""
