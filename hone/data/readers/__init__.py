"""Readers: documents from files, archives, pages and named data sets; what cannot be read is reported with its reason."""
