"""Pruners: weights of a matrix that become zero. One file a technique."""
