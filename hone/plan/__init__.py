"""Plans across stages: what to build and how to run it, chosen from all that the rooms below can do."""
