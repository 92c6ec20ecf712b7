"""Model folders shard by shard: durable files, an index, exact sizes in advance; and layers that ranks read together, the head as the last."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.durable import NO_SPACE, sync, write_atomic
from hone.base.errors import ArtifactError, FitError
from hone.base.ranks import Mesh
from hone.compress.layer import original
from hone.compress.matrix import Matrix
from hone.compress.quantizers.base import Quantizer
from hone.compress.targets import EMBEDDING, HEAD, Linear
from hone.cost.compress import balanced
from hone.model.context import Context
from hone.model.decoder import Decoder, DecoderLayer
from hone.model.families.config_json import OWN
from hone.model.hf import config_values
from hone.model.quantized import layouts
from hone.model.shards import INDEX, save_tensors
from hone.model.weights.header import DTYPES
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource
from hone.model.weights.tensors import layer_modules


class ExchangedWeights(View):
    """The weights of `source`, some of which other ranks have sent: those are in memory."""

    def __init__(self, source: WeightSource, tensors: dict[str, Tensor]) -> None:
        super().__init__(source)
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.source.tensor(name)


class UntiedWeights(View):
    """The weights of `source`, whose head is tied to the embedding, with a head of the same values."""

    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.source.names(), f"{HEAD}.weight")))  # some store it beside a tied embedding

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(_stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(_stored(name))

    def file(self, name: str) -> Path:
        return self.source.file(_stored(name))


def untied(source: ModelSource) -> ModelSource:
    """The model of `source`, whose head is tied to the embedding, with a head of its own that has the same values."""
    config = source.config.model_copy(update={"tie_embeddings": False})
    own = source.values.get("model_type") == OWN
    values = config_values(config, source.dtype) if own else source.values | {"tie_word_embeddings": False}
    return ModelSource(source.folder, config, values, UntiedWeights(source), hadamards=source.hadamards)


def _stored(name: str) -> str:
    """The tensor of a tied model that holds the values of the one called `name`."""
    return f"{EMBEDDING}.weight" if name == f"{HEAD}.weight" else name


class HeadLayer(nn.Module):
    """The end of a model as a layer of the engine: its outputs are its inputs, which the norm and the head read."""

    def __init__(self, ends: Decoder) -> None:
        super().__init__()
        self.norm, self.lm_head = ends.norm, _Unmultiplied(ends.lm_head.weight)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.lm_head(self.norm(x))
        return x

    def original(self, stored: dict[str, Tensor], path: str) -> Tensor:
        """The head's weight, as `LayerWeights.weight`; `stored` are its checkpoint tensors."""
        return original(self.lm_head.weight.detach(), [stored[f"{path}.weight"]])


class _Unmultiplied(nn.Module):
    """A weight whose inputs are observed: logits of a whole batch would take more memory than all of its hidden states."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> None:
        return None


def build_layer(
    checkpoint: ModelSource, index: int, device: str, dtype: torch.dtype, mesh: Mesh
) -> DecoderLayer | HeadLayer:
    """Layer `index` on every rank of `mesh`: each reads some of its matrices and sends them to the others. After the last layer
    the head, which every rank reads.

    Alone it would copy the whole layer to its GPU, which is many times slower than from another GPU.
    """
    if index == checkpoint.config.num_layers:
        return HeadLayer(checkpoint.build_ends(device, dtype))
    if mesh.world_size == 1:
        return checkpoint.build_layer(index, device, dtype)
    modules = layer_modules(checkpoint.config, index)
    sizes = {f"{module.name}.weight": float(math.prod(module.shape)) for module in modules}
    there = set(checkpoint.names())  # a missing one is an error when the layer is built
    names = [name for name in sizes if name in there]
    readers = balanced([sizes[name] for name in names], mesh.world_size)
    mine = [name for name, rank in zip(names, readers, strict=True) if rank == mesh.rank]
    tensors = mesh.exchange({name: checkpoint.tensor(name) for name in mine}, device)
    return checkpoint.viewed(ExchangedWeights(checkpoint, tensors)).build_layer(index, device, dtype)


def quantized_embedding(
    checkpoint: ModelSource, quantizer: Quantizer, device: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint tensors that replace the embedding's weight, by name, and its row of layers.jsonl."""
    name = f"{EMBEDDING}.weight"
    stored = checkpoint.tensor(name)
    weight = checkpoint.converted(name, stored, device, torch.promote_types(stored.dtype, torch.float32))
    matrix = Matrix(EMBEDDING, weight, checkpoint.dtype, modules=(len(weight),))
    quantizer.apply(matrix)
    assert matrix.stored is not None, f"{quantizer.kind} stored nothing"
    row = matrix.row([EMBEDDING], [quantizer.kind])
    return {f"{EMBEDDING}.{suffix}": one.cpu() for suffix, one in layouts.write(matrix.stored).items()}, row


def given_weights(checkpoint: ModelSource, targets: Iterable[Iterable[Linear]], device: str) -> Iterator[Tensor]:
    """The weights of the linears in `targets`, by layer, a checkpoint module at a time."""
    for linears in targets:
        opened = checkpoint.reopened()  # so that its memory maps are freed with it
        for linear in linears:
            for name, _ in linear.modules:
                yield opened.tensor(f"{name}.weight").to(device)


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def finished_layers(draft: Draft, count: int) -> int:
    """Number of leading layers, of `count`, whose shard and marker exist."""
    done = 0
    while done < count and marker(draft, done).exists():
        if not (draft.folder / shard_name(done + 2, count + 1)).exists():
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


def write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Writes the index that maps every tensor to its shard."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


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
