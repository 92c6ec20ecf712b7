"""`hone hardware`: the catalogue listed and compared."""
