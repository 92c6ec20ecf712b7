"""Removal of documents that are in the corpus already, one method a file."""
