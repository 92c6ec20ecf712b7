"""Kernels of near-duplicate detection: shingles, signatures, equal and near numbers, and the sets they join."""
