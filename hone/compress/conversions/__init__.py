"""Conversions: a checkpoint becomes a model of another architecture, whose weights are made of those it had."""
