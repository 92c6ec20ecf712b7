"""Constrained generation: grammars, allowed tokens and banned words as bit masks over the vocabulary."""
