"""Compression: how much shorter a text becomes, which repetition raises."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import zstandard

from hone.text.batch import Texts


def compression_ratio(texts: Texts, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """float64 [num_texts]: bytes of each text per byte of zstd at level 1, each alone; `columns` has its "bytes"."""
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=False)
    data = memoryview(np.ascontiguousarray(texts.data))
    sizes = (len(compressor.compress(data[start:end])) for start, end in itertools.pairwise(texts.offsets.tolist()))
    return columns["bytes"] / np.maximum(np.fromiter(sizes, np.int64, texts.num_texts), 1)
