"""Objectives on preferences: of two answers to one prompt the chosen one becomes more likely than the rejected one."""
