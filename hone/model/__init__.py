"""One decoder for training and serving, built from a config; the only room that knows checkpoint formats."""
