"""`hone cost WORD`: formulas with their numbers."""
