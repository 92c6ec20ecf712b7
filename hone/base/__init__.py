"""Typed specs, figures, artifacts, technique tables and errors, which every other room uses."""
