"""Objectives that train draft heads."""
