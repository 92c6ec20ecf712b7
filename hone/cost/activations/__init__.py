"""Activations of a training: what segments of layers keep of them, and when."""
