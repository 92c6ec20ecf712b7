"""`hone plan GOAL`: a search from the command line."""
