"""Ways run for some steps on this machine: what they took, and predictions corrected by it."""
