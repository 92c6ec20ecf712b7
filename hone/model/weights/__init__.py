"""Where weights come from: stored tensors by name, views of them, and the tensors that a config describes."""
