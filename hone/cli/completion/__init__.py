"""`hone completion`: a script with which a shell completes hone's verbs, options and values without starting Python."""
