"""Matrix products of linear layers: dense, few rows, 4-bit, 8-bit and fp8 weights, and 2:4 sparsity."""
