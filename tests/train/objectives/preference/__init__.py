"""Tests of objectives on preferences."""
