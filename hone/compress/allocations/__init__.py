"""Bit allocations: how many bits each matrix gets, so that the model fits a budget of bytes. One file a technique."""
