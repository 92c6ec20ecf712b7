"""The search for a plan: every configuration of a goal priced in numpy, the best ones planned exactly, executed and refitted."""
