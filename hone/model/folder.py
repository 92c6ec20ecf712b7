"""What a model folder weighs, without opening a file."""

from __future__ import annotations

from pathlib import Path


def weights_bytes(folder: Path | str) -> int:
    """Bytes of the folder's *.safetensors files; 0 when it has none."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
