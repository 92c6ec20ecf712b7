"""Eviction from the prefix cache: which cached pages are given out first when no blank page is left."""
