"""Model folders shard by shard: durable files, the markers of finished layers, an index, and exact sizes in advance."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.base.artifact import Draft
from hone.base.durable import NO_SPACE, sync, write_atomic
from hone.base.errors import ArtifactError, FitError
from hone.model.shards import INDEX, save_tensors
from hone.model.weights.header import DTYPES


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def shard_file(draft: Draft, index: int, count: int) -> Path:
    """The file, one of `count`, of layer `index`, of the head after the last layer, or of what is outside them (-1)."""
    return draft.folder / shard_name(index + 2, count)


def finished_layers(draft: Draft, count: int) -> int:
    """Number of leading layers, of `count`, whose shard and marker exist."""
    done = 0
    while done < count and marker(draft, done).exists():
        if not shard_file(draft, done, count + 1).exists():
            break
        done += 1
    return done


def mark(draft: Draft, index: int, rows: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Writes the marker of a layer that is on disk: its rows of layers.jsonl, and its tensors' bytes by name."""
    entry = {"rows": rows, "tensors": {name: tensor.nbytes for name, tensor in tensors.items()}}
    write_atomic(marker(draft, index), json.dumps(entry).encode())


def marker(draft: Draft, index: int) -> Path:
    """The marker of layer `index`, or of the embedding (-1)."""
    return draft.state / (f"layer-{index:05d}.json" if index >= 0 else "embedding.json")


@contextmanager
def full_disk_said(path: Path) -> Iterator[None]:
    """Turns the error of a full disk into a FitError; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise FitError(
            f"{NO_SPACE[error.errno]} for {path}", fix="free disk space and run the same command again, it resumes"
        ) from None


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes `tensors` atomically: a kill leaves no file or the whole one. Raises FitError when the disk is full."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with full_disk_said(path):
            save_tensors(temporary, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_shard(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a shard whose names begin with `prefix`, in memory of their own. Raises ArtifactError when it is corrupt."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} is corrupt: {error}", fix="delete the unfinished folder and start again") from None


def write_index(draft: Draft, count: int, outside: dict[str, int], *, embedding: bool) -> list[dict[str, Any]]:
    """Writes the index that maps every tensor to its shard, of `count`; returns the rows of all markers.

    `outside` are the bytes of tensors outside the layers that no marker names; that of the `embedding` is read where it is compressed.
    """
    weight_map = dict.fromkeys(outside, shard_file(draft, -1, count).name)
    total, rows = sum(outside.values()), []
    for index in range(-1 if embedding else 0, count - 1):
        entry = json.loads(marker(draft, index).read_text(encoding="utf8"))
        weight_map.update(dict.fromkeys(entry["tensors"], shard_file(draft, index, count).name))
        total += sum(entry["tensors"].values())
        rows += entry["rows"]
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(draft.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return rows


def shard_bytes(tensors: Iterable[tuple[str, Any, tuple[int, ...]]]) -> int:
    """Exact file size of a shard of (name, torch dtype, shape): its header as safetensors writes it, then the data."""
    rows = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    names = {getattr(torch, kind): name for name, kind in DTYPES.items()}
    ranks = {dtype: rank for rank, dtype in enumerate(names)}
    for name, dtype, shape in sorted(rows, key=lambda row: (ranks[row[1]], row[0])):
        size = dtype.itemsize
        for length in shape:
            size *= length
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + offset
