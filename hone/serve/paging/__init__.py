"""The paged KV cache: which pages are whose, their tensors, and the context that reads and writes them."""
