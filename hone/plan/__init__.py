"""Search over what the rooms below can do, with their costs."""
