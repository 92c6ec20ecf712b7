"""Executors: where the tasks of the data stage run; what they write is the same everywhere."""
