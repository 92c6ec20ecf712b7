"""Calculators: formulas of papers with their numbers in them, one file a question; `hone cost WORD` prints them."""
