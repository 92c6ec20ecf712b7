"""`hone schedule`: when and where jobs run."""
