"""Rule filters over signal columns, one file each."""
