"""Benchmarks of the data room: speed per core and quality against ground truth, peers in the same run."""
