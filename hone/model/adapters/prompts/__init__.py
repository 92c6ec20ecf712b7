"""Soft prompts: trained keys and values, or embeddings that become them, before the tokens of every document."""
