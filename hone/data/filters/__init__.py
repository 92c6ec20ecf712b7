"""Rule filters over signal columns. One file per filter."""
