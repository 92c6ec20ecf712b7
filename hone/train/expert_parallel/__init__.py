"""Expert parallelism: each rank holds some experts of every layer, and computes them for the tokens of all ranks."""
