"""Context parallelism: attention over a sequence of which each rank of an axis holds a part."""
