"""Sampling of tokens from logits: `sample`."""
