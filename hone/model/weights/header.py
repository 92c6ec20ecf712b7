"""The header of a safetensors file: format, shape and place of each of its tensors, read without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from hone.base.errors import ArtifactError

DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
"""torch's names of number formats by safetensors' names, in the order in which safetensors stores tensors (within a format by name)."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Formats of weights that are not quantized."""


class HeaderEntry(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    """safetensors' name of its format: 'BF16'."""
    shape: tuple[int, ...]
    begin: int
    """Its bytes are those of the file from `begin` ..."""
    end: int
    """... to `end`."""


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file by name. Raises ArtifactError when its header cannot be read."""
    with open(path, "rb") as file:
        try:
            size = struct.unpack("<Q", file.read(8))[0]
            rows = json.loads(file.read(size))
            start = 8 + size
            return {
                name: HeaderEntry(
                    row["dtype"], tuple(row["shape"]), *(start + offset for offset in row["data_offsets"])
                )
                for name, row in rows.items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError, struct.error, MemoryError, OverflowError):
            raise ArtifactError(
                f"{path} is corrupt: its header cannot be read", fix="download or write the file again"
            ) from None
