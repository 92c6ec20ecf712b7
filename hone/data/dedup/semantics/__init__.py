"""Semantic deduplication by embeddings."""
