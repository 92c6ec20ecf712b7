"""Readers: files, archives, pages and named data sets to documents; what cannot be read is handed on with its reason."""
