"""Named tensors in the safetensors files of a folder, one file or many with an index: read lazily, written shard by shard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.base.durable import kind_of
from hone.base.errors import ArtifactError
from hone.model.folder import read_json
from hone.ops.dispatch import say_once

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PREDICTOR = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
"""The name of a tensor that a layer has which predicts a further token, and no other."""


class Shards:
    """The tensors of a folder, read on request: those of its index, or of the file `single`.

    Raises ArtifactError, naming file and tensor, for a missing or corrupt one.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self.folder = folder
        self.single = single
        self._files: dict[str, Any] = {}
        self._where = _without_predictors(self._tensor_files(), folder)

    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._where)

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.folder / self._where[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU, in the dtype of the file; its memory is the mapped file."""
        self.need(name)
        try:
            return self._open(self._where[name]).get_tensor(name)
        except SafetensorError as error:
            raise _corrupt(self.file(name), error, name) from None

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """`index` of the tensor called `name`; the rest is not read."""
        self.need(name)
        try:
            return self._open(self._where[name]).get_slice(name)[index]
        except SafetensorError as error:
            raise _corrupt(self.file(name), error, name) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the file's header."""
        self.need(name)
        try:
            return tuple(self._open(self._where[name]).get_slice(name).get_shape())
        except SafetensorError as error:
            raise _corrupt(self.file(name), error, name) from None

    def need(self, name: str) -> None:
        """Raises ArtifactError unless there is a tensor called `name`."""
        if name not in self._where:
            raise ArtifactError(
                f"{self.folder} has no tensor {name}, which the model of its config.json needs",
                fix="download or write the checkpoint again",
            )

    def close(self) -> None:
        """Unmaps the files; they are opened again on the next read."""
        self._files.clear()

    def reopened(self) -> Self:
        """The same tensors with memory maps of their own."""
        found = copy(self)
        found._files = {}
        return found

    def _tensor_files(self) -> dict[str, str]:
        """The file of each tensor name."""
        if (self.folder / INDEX).exists():
            files = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(files, dict):
                raise _corrupt(self.folder / INDEX, ValueError("no weight_map"))
            for name, file in files.items():
                # A path out of the folder could read private files.
                if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                    raise _corrupt(
                        self.folder / INDEX, ValueError(f"{name} is in {file!r}, which names no file beside it")
                    )
            return files
        if not (self.folder / self.single).exists():
            raise ArtifactError(
                f"{self.folder} has neither {self.single} nor {INDEX}",
                fix="point at a folder with safetensors weights (save_pretrained writes one)",
            )
        return dict.fromkeys(self._open(self.single).keys(), self.single)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            if not path.exists():
                raise ArtifactError(f"{path} is missing", fix="download or write the checkpoint again")
            if kind := kind_of(path):
                raise ArtifactError(f"{path} is {kind}, not a file", fix="download or write the checkpoint again")
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise _corrupt(path, error) from None
        return self._files[file]


def write_tensors(tensors: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    """Writes named tensors as model.safetensors, or as numbered shards with an index when they are larger.

    Only one shard is in memory at a time, beside the tensors' own storage. A tensor larger than
    `max_shard_bytes` gets a shard of its own.
    """
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    filled = total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and filled + size > max_shard_bytes:
            shards.append(_write_shard(held, folder / f"{len(shards)}.shard"))
            held, filled = {}, 0
        held[name] = tensor.cpu().contiguous()
        filled += size
        total += size
    shards.append(_write_shard(held, folder / f"{len(shards)}.shard"))
    if len(shards) == 1:
        (folder / "0.shard").rename(folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)  # left over from an earlier save
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.shard").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / SINGLE).unlink(missing_ok=True)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(tensors: dict[str, Tensor], path: Path) -> list[str]:
    save_tensors(path, tensors)
    return list(tensors)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes contiguous tensors as one safetensors file with the permissions of the umask, and `metadata` in its header.

    The library creates files of mode 0600 and raises its own error where the disk does not take them; here that is an OSError.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is not None:
            code = int(found[1])
            raise OSError(code, os.strerror(code), str(path)) from None
        raise
    path.chmod(mode)


def _without_predictors(files: dict[str, str], folder: Path) -> dict[str, str]:
    """`files` without the layers behind the last one that predict further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    layers = tuple(found[1] for found in map(_PREDICTOR.fullmatch, files) if found)
    if not layers:
        return files
    say_once(
        f"{folder}: {', '.join(layer[:-1] for layer in layers)} predict further tokens (multi-token prediction), which hone does not "
        "run; their tensors are left out, as transformers leaves them out"
    )
    return {name: file for name, file in files.items() if not name.startswith(layers)}


def _corrupt(path: Path, error: Exception, tensor: str = "") -> ArtifactError:
    where = f"{path}, tensor {tensor}" if tensor else str(path)
    return ArtifactError(f"{where} is corrupt: {error}", fix="download or write the file again")


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
