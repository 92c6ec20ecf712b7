"""Cross entropy of a linear head without storing all logits: `linear_cross_entropy`."""
