"""Typed specs, figures, artifacts, technique tables and errors: what every other room stands on."""
