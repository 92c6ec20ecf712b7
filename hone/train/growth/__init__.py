"""Training that starts from a smaller model: what it may read of it, and what the two phases cost and lose."""
