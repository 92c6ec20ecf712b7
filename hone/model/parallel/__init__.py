"""A model of which each process holds a part: some heads and columns of every layer, some layers, or both."""
