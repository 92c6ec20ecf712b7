"""Checksums of the tensors of a checkpoint's files: written into their headers, and compared when they are read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CRC = "crc32"
"""The entry of a header, or of a JSON object, that has checksums: CRC-32 as in zlib, of every tensor in a header."""

_REST = ""
"""Among a header's checksums that of its other entries; no tensor has this name."""


def of_tensor(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of the elements of a contiguous tensor on the CPU, in the machine's byte order; `start` is the one to go on from."""
    import torch

    return zlib.crc32(memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()), start)


def with_checksums(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`metadata` of a file of contiguous tensors on the CPU, and their checksums."""
    found = {name: of_tensor(tensor, _kind(name, tensor)) for name, tensor in tensors.items()}
    return {**metadata, CRC: json.dumps({**found, _REST: _of_object({"format": "pt", **metadata})})}


def damage_of(path: Path) -> str:
    """What is wrong with the tensors of a safetensors file, as its header says; '': nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        metadata = dict(file.metadata() or {})
        said = json.loads(metadata.pop(CRC, "null"))
        names = list(file.keys())
        if said is None or {*said} != {*names, _REST} or said[_REST] != _of_object(metadata):
            return f"{path.name}: its header is not the one that was written"
        for name in names:
            tensor = file.get_tensor(name)
            if of_tensor(tensor, _kind(name, tensor)) != said[name]:
                return f"{path.name}: the bytes of {name} are not those that were written"
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        return f"{path.name}: {type(error).__name__}: {error}"
    return ""


def sealed(values: Mapping[str, Any]) -> str:
    """A JSON object with its checksum."""
    return json.dumps({**values, CRC: _of_object(values)})


def unsealed(text: str) -> dict[str, Any]:
    """The object that `sealed` got. Raises ValueError when it is another text."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    if values.pop(CRC, None) != _of_object(values):
        raise ValueError("its text is not the one that was written")
    return values


def _kind(name: str, tensor: Tensor) -> int:
    """The checksum of what a header says of a tensor, from which that of its bytes goes on."""
    return _of_object([name, str(tensor.dtype), list(tensor.shape)])


def _of_object(values: Any) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
