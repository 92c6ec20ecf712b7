"""Numeric operations: one function an op, a plain torch reference for each; fast twins come beside them."""
