"""Training whose layers' linears compute in fp8: which they are, and their weights' codes."""
