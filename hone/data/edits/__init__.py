"""Edits: cut spans out of documents that are already in the corpus."""
