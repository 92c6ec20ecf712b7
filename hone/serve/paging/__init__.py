"""The paged KV cache: allocation of pages, their tensors, and the context that reads and writes them."""
