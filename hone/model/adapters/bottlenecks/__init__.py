"""Bottleneck adapters: two thin linears and a nonlinearity beside or behind a block, inside its residual connection."""
