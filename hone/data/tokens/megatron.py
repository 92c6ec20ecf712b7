"""Megatron's index of a token file: `<split>.bin` with `<split>.idx` beside it is an indexed dataset of Megatron-LM.

The format is Megatron-Core's MMIDIDX version 1: magic, version, a code for the token type, the counts, then the length of
each sequence in tokens (int32), its byte offset (int64) and the sequences that documents begin with (int64).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from hone.base.durable import write_atomic
from hone.base.errors import FitError

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {"uint16": 8, "uint32": 4}  # ids are below 2^31: uint32 and Megatron's int32 are the same bytes


def write_index(path: Path, starts: np.ndarray, dtype: np.dtype) -> None:
    """Writes the index of documents that begin at `starts` (int64 [num_documents + 1]), each one sequence, to `path`.

    Raises FitError when a document has more tokens than the format can store.
    """
    lengths = np.diff(starts)
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise FitError(
            f"a document of {lengths.max()} tokens is longer than Megatron's index can store",
            fix="set max_document_chars lower, or packing.megatron: false",
        )
    head = _MAGIC + struct.pack("<QBQQ", 1, _CODES[dtype.name], len(lengths), len(starts))
    parts = [lengths.astype("<i4"), (starts[:-1] * dtype.itemsize).astype("<i8"), np.arange(len(starts), dtype="<i8")]
    write_atomic(path, head + b"".join(part.tobytes() for part in parts))
