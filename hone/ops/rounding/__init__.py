"""Rounding of a matrix to integer codes, column by column, with the errors of earlier columns compensated in later ones."""
