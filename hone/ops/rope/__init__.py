"""Rotary position embedding: `rope`, `rope_write`."""
