"""GGUF: one file of metadata, tokenizer and blocks of weights, as llama.cpp reads it."""
