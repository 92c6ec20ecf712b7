"""Rows of the kernel table, one file per area: hone and its peer timed in turn, as a fraction of a measured ceiling."""
