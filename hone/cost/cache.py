"""The cache of a layer between passes, declared as data: shapes and dtypes of tensors, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of one number by name of the dtype."""

EIGHT_BITS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}
"""Values of `kv_cache_dtype` whose numbers have scales, and the dtype of each."""

SCALE_BYTES = 4
"""Bytes of the scale of a token's key or value head in a cache of 8 bits whose scales are not fixed."""


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
        """Bytes of one token or one sequence in a cache of `dtype`, without scales."""
        return self.num_values * BYTES[dtype if self.dtype == "auto" else self.dtype]

    def scale_bytes(self, dtype: str) -> int:
        """Bytes of the scales of one token in a cache of `dtype` that computes them when it writes: one for each head."""
        scaled = self.paged and self.dtype == "auto" and dtype in EIGHT_BITS.values()
        return SCALE_BYTES * math.prod(self.shape[:-1]) if scaled else 0


LayerCache = tuple[CacheTensor, ...]
"""The cache tensors of one layer."""


def keys_and_values(num_kv_heads: int, head_dim: int) -> LayerCache:
    """The cache of softmax attention: keys and values of every head."""
    return CacheTensor("k", (num_kv_heads, head_dim)), CacheTensor("v", (num_kv_heads, head_dim))


def page_bytes(layers: Sequence[LayerCache], block_size: int, dtype: str, *, fixed_scales: bool = False) -> int:
    """Bytes of one page of `block_size` tokens over all layers. `fixed_scales`: a cache of 8 bits has those of a checkpoint,
    which take no part of a page."""
    paged = [one for layer in layers for one in layer if one.paged]
    scales = 0 if fixed_scales else sum(one.scale_bytes(dtype) for one in paged)
    return block_size * (scales + sum(one.num_bytes(dtype) for one in paged))


def cache_dtype(asked: str, weights: str) -> str:
    """The dtype of a cache's numbers for `kv_cache_dtype` `asked` and weights of dtype `weights`."""
    return weights if asked == "auto" else EIGHT_BITS.get(asked, asked)
