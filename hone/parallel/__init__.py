"""Many devices, one process each: their places in a grid, and the collectives of the ranks that share a layer."""
