"""Context parallelism: the ranks of an axis share each sequence, and attend to all of it."""
