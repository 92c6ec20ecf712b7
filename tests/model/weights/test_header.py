"""Headers say what safetensors wrote, and a damaged one is a clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hone.base.errors import ArtifactError
from hone.model.weights.header import DTYPES, read_header


def test_it_is_what_was_written(tmp_path: Path) -> None:
    written = {
        f"{place}.weight": torch.arange(6).to(getattr(torch, name)).view(2, 3)
        for place, name in enumerate(DTYPES.values())
    }
    path = tmp_path / "x.safetensors"
    save_file(written, path, metadata={"format": "pt"})
    header, data = read_header(path), path.read_bytes()
    assert list(header) == [f"{place}.weight" for place in range(len(DTYPES))], (
        "safetensors stores formats in this order"
    )
    for name, tensor in written.items():
        stored = header[name]
        assert getattr(torch, DTYPES[stored.dtype]) == tensor.dtype and stored.shape == (2, 3)
        assert data[stored.begin : stored.end] == bytes(tensor.view(torch.uint8).flatten().tolist())
    assert max(stored.end for stored in header.values()) == len(data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    ],
)
def test_a_damaged_one_says_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"x\.safetensors is corrupt: its header cannot be read"):
        read_header(path)
