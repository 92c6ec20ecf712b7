"""Decontamination: documents that hold examples of evaluation sets are found, reported and taken out."""
