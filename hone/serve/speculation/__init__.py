"""Speculative decoding: drafters that guess tokens ahead, and the verification that keeps the output distribution exact."""
