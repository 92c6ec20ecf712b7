"""Deduplication: drops documents that are already in the corpus. One file per method."""
