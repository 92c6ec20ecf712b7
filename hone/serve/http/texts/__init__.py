"""Tokenization and chat templates in processes of their own, with deadlines and memory limits."""
