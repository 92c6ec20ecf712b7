"""The cache of a layer between passes, declared as data: shapes and dtypes of tensors, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of one number by name of the dtype."""


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's cache, under the name that the mixer stores and reads it by.

    `paged`: `shape` is that of one token, and the pages of all sequences together are
    [num_pages, *shape[:-1], block_size, shape[-1]] (the tokens of a page are the axis before the last). Otherwise `shape`
    is that of one sequence of any length: a recurrent state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "auto"
    """Dtype; "auto" is the cache's (`kv_cache_dtype`)."""
    paged: bool = True

    @property
    def num_values(self) -> int:
        """Numbers of one token (paged) or one sequence."""
        return math.prod(self.shape)

    def num_bytes(self, dtype: str) -> int:
        """Bytes of one token or one sequence in a cache of `dtype`."""
        return self.num_values * BYTES[dtype if self.dtype == "auto" else self.dtype]


LayerCache = tuple[CacheTensor, ...]
"""The cache tensors of one layer."""


def keys_and_values(num_kv_heads: int, head_dim: int) -> LayerCache:
    """The cache of softmax attention: keys and values of every head."""
    return CacheTensor("k", (num_kv_heads, head_dim)), CacheTensor("v", (num_kv_heads, head_dim))


def page_bytes(layers: Sequence[LayerCache], block_size: int, dtype: str) -> int:
    """Bytes of one page of `block_size` tokens over all layers."""
    return block_size * sum(one.num_bytes(dtype) for layer in layers for one in layer if one.paged)
