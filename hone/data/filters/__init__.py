"""Rule filters over signal columns, in files by paper."""
