"""Curricula: the order in which a training reads packed sequences. One file per curriculum."""
