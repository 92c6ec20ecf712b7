"""Annotation and rephrasing of documents by a language model behind an OpenAI-compatible endpoint."""
