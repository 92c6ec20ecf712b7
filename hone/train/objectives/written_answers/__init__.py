"""Objectives on answers that the model writes itself, of which rewards say what they are worth."""
