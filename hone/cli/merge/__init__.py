"""The verb `merge`."""
