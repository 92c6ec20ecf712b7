"""The optimizer's passes over a weight and its gradient, in as few reads and writes as they take."""
