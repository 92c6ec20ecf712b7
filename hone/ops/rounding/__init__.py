"""Rounding and pruning of a matrix, column by column, with the errors of earlier columns compensated in later ones."""
