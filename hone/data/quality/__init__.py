"""Quality models: scorers that add a column per model, which filters' expressions then decide by."""
