"""Attention over a paged key/value cache: `attend_paged`, `attend_latent`, `write_kv`."""
