"""Policies that choose the clock or the power limit of a GPU while it works."""
