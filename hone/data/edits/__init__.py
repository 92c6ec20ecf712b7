"""Edits: parts of documents are cut out because the corpus holds them already, one method a file."""
