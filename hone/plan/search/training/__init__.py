"""The training part of a search: its configurations, and their seconds and bytes as arrays."""
