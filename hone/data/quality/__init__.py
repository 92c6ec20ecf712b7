"""Quality models: scorers that add a column each, which filters use."""
