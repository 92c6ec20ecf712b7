"""How good a model is: perplexity, bits per byte, distance to a reference model."""
