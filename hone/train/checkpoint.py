"""Checkpoints of a training: folders of safetensors and JSON, written atomically; the newest few are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.durable import sync

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "step-"


class Checkpoints:
    """Checkpoints in `folder`, each `step-00000100/` with tensors.safetensors and numbers.json.

    A checkpoint is written under another name, synced, and renamed: after a kill it is whole or missing.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self.largest_bytes = self._bytes()
        """The largest number of bytes that whole checkpoints had on disk at once."""

    def save(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Writes the state after `step`; deletes all but the newest `keep` checkpoints."""
        from hone.model.shards import save_tensors

        target = self.folder / f"{_PREFIX}{step:08d}"
        partial = target.with_name(target.name + ".partial")
        for stale in (partial, target):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        save_tensors(partial / "tensors.safetensors", {name: tensor.contiguous() for name, tensor in tensors.items()})
        (partial / "numbers.json").write_text(json.dumps(numbers), encoding="utf8")
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        os.rename(partial, target)
        sync(self.folder)
        self.largest_bytes = max(self.largest_bytes, self._bytes())
        for _, old in self._whole()[: -self.keep]:
            shutil.rmtree(old)

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """(tensors, numbers) of the newest whole checkpoint; None when there is none."""
        from safetensors.torch import load_file

        whole = self._whole()
        if not whole:
            return None
        _, folder = whole[-1]
        tensors = load_file(folder / "tensors.safetensors")
        # In older checkpoints the embedding was no module, and its weight was named "embedding".
        named = {f"{name}.embed_tokens.weight" if (name := key.removesuffix(".embedding")) != key else key: tensor
                 for key, tensor in tensors.items()}  # fmt: skip
        return named, json.loads((folder / "numbers.json").read_text("utf8"))

    def _bytes(self) -> int:
        return sum(file.stat().st_size for _, folder in self._whole() for file in folder.iterdir())

    def _whole(self) -> list[tuple[int, Path]]:
        """(step, folder) of every finished checkpoint, oldest first."""
        found = []
        for path in self.folder.iterdir():
            number = path.name.removeprefix(_PREFIX)
            if path.is_dir() and number.isdigit() and (path / "numbers.json").exists():
                found.append((int(number), path))
        return sorted(found)
