"""Evaluation of a model: perplexity, bits per byte, distance to a reference model, a bigram model to beat."""
