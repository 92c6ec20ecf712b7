"""Techniques that stand outside hone: each one file and one line in a table."""
