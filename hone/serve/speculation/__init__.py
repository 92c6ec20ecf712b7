"""Speculative decoding: what guesses tokens ahead, and the check that keeps the text exact."""
