"""What a model folder weighs and says of itself, without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.base.errors import ArtifactError


def weights_bytes(folder: Path | str) -> int:
    """Bytes of the folder's *.safetensors files; 0 when it has none."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ArtifactError when it is missing or broken."""
    try:
        values = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ArtifactError(f"no file {path}", fix="point at a folder that hone or transformers wrote") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is corrupt: {error}", fix="download or write the folder again") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is no JSON object", fix="download or write the folder again")
    return values
