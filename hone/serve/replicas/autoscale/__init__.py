"""How many replicas there should be: one policy a file, the same for a simulation and for real processes."""
