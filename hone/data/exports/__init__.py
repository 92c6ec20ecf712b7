"""Exports: the result in other forms: dropped documents in full, JSONL, a Hugging Face data set."""
