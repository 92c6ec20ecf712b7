"""Cross entropy of a linear head without its logits: `linear_cross_entropy`."""
