"""Compiled kernels for CPUs: vectors in LLVM through numba, and programs of many operations that torch's threads run in one call."""
