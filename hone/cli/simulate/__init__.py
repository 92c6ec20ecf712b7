"""The verb `hone simulate`."""
