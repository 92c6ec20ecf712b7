"""Batches of texts as one buffer of UTF-8 bytes and the offsets between them, the input of the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hone.base.lazy import lazy

pa = lazy("pyarrow")


class Texts(NamedTuple):
    """n concatenated texts. `data` uint8 [num_bytes], UTF-8; `offsets` int64 [n + 1]: text i is data[offsets[i]:offsets[i + 1]].

    `offsets` need not begin at 0, nor `data` end with the last text: both may be views of an Arrow buffer.
    """

    data: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, strings: Sequence[str]) -> Texts:
        """Encodes `strings`. Raises UnicodeEncodeError for a lone surrogate, which has no UTF-8 form."""
        raw = [text.encode() for text in strings]
        offsets = np.zeros(len(raw) + 1, np.int64)
        np.cumsum([len(text) for text in raw], out=offsets[1:])
        return cls(np.frombuffer(b"".join(raw), np.uint8), offsets)

    @classmethod
    def from_arrow(cls, array: Any) -> Texts:
        """Views the buffers of an Arrow large_string array without a copy; of other string arrays the offsets are widened."""
        if not pa.types.is_large_string(array.type):
            array = array.cast(pa.large_string())
        assert array.null_count == 0, "texts must not be null"
        _, offsets, data = array.buffers()
        if offsets is None or not len(array):
            return cls(np.empty(0, np.uint8), np.zeros(1, np.int64))
        places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        return cls(np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), places)

    def to_arrow(self) -> Any:
        """The same buffers as an Arrow large_string array."""
        offsets = np.ascontiguousarray(self.offsets, np.int64)
        data = np.ascontiguousarray(self.data)
        return pa.LargeStringArray.from_buffers(self.num_texts, pa.py_buffer(offsets), pa.py_buffer(data))

    @property
    def num_texts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    def strings(self) -> Iterator[str]:
        """The texts one by one, decoded."""
        for start, end in zip(self.offsets[:-1], self.offsets[1:]):
            yield bytes(self.data[start:end]).decode()
