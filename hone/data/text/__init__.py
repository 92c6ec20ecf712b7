"""Text as bytes: batches of documents in one buffer, and the kernels over them."""
