"""Identifiers of languages: hone's own model, Compact Language Detector 2, and models of fastText."""
