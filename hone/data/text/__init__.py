"""Text as bytes: batches of documents in one buffer, and the kernels that go over them."""
