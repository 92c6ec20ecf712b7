"""Transforms: scales and rotations that move between the linears of a layer, before its matrices are compressed. One file a technique."""
