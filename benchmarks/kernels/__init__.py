"""Rows of the kernel table, an area a file: hone and its peer timed in turn, as a fraction of a measured ceiling."""
