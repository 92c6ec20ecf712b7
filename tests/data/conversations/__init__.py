"""Tests of the data stage on conversations."""
