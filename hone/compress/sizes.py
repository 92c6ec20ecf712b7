"""Exact sizes of a compressed model in advance: its current tensors, and those that replace them."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from hone.base.errors import ArtifactError
from hone.compress.quantizers.base import Quantizer
from hone.compress.shards import shard_bytes
from hone.compress.step import Assigned
from hone.compress.targets import HEAD, Linear, has_head
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.model.families import FAMILIES
from hone.model.families.stored import refuse_unread
from hone.model.quantized.dense import cache_scales, quantized_modules
from hone.model.shards import Shards
from hone.model.weights.header import DTYPES, read_header
from hone.model.weights.stacked import ApartExperts, Stacked, stack_experts
from hone.model.weights.tensors import model_tensors

Entry = tuple[torch.dtype, tuple[int, ...]]


def entries(model: CheckpointFacts, config: ModelConfig | None = None) -> dict[str, Entry]:
    """Dtype and shape of every tensor: from the headers of the folder if it exists, else from its config.

    Quantized linears count as dense ones in the checkpoint's dtype, and scales of a KV cache not at all, as
    `dense.dequantized` reads them. With `config`, the tensors of the smaller model of that config, which has the dtypes of `model`.
    Raises ArtifactError for a tensor that the model does not read.
    """
    folder = Path(model.where)
    planned = _planned(config or model.config, getattr(torch, model.dtype))
    if not (folder / model.mark).is_file():
        return planned
    found = _headers(folder, model.config)
    if model.quantization is not None:
        for name in cache_scales(model.config, model.quantization):
            found.pop(name, None)
        for one in quantized_modules(model.config, model.quantization):
            for name in one.tensors:
                found.pop(name, None)  # a missing one is an error when it is read
            found[f"{one.name}.weight"] = (getattr(torch, model.dtype), (one.rows, one.columns))
    read = _planned(model.config, getattr(torch, model.dtype))
    refuse_unread(dict.fromkeys(found, folder), read, model.config)  # it would be kept or lost without a word
    if config is None:
        return found
    return {name: (found.get(name, entry)[0], entry[1]) for name, entry in planned.items()}


def untied(before: CheckpointFacts, after: CheckpointFacts) -> dict[str, Entry]:
    """The head of the model `after`, where it is apart from the embedding and that of `before` was not."""
    if not before.config.tie_embeddings or after.config.tie_embeddings:
        return {}
    return {"lm_head.weight": (getattr(torch, after.dtype), (after.config.vocab_size, after.config.hidden_size))}


def shard_sizes(
    before: dict[str, Entry],
    targets: tuple[tuple[Linear, ...], ...],
    quantizers: Assigned,
    rest_dtype: torch.dtype | None,
    dtype: torch.dtype,
    embedding: Linear | None = None,
    stacked: Stacked | None = None,
) -> list[int]:
    """Bytes of every shard, the first with the tensors outside the layers, the last with the head if it is compressed. `dtype` is the checkpoint's;
    `embedding` is given where it is compressed, `stacked` where experts become one tensor."""
    layers: list[dict[str, Entry]] = [{} for _ in targets]
    ends = {}
    head = f"{HEAD}.weight" if has_head(targets) else ""
    for name, (kind, shape) in before.items():
        if name == head:
            layers[-1][name] = (kind, shape)
        elif name.startswith("model.layers."):
            layers[int(name.split(".")[2])][name] = (kind, shape)
        else:
            ends[name] = (stored_rest(kind, shape, rest_dtype), shape)
    pairs = [*zip(layers, targets, strict=True), (ends, () if embedding is None else (embedding,))]
    for index, (tensors, linears) in enumerate(pairs):
        for linear in linears if quantizers.template is not None else ():
            quantizer = quantizers.of(index, linear)
            for name, rows in linear.modules:
                tensors.pop(f"{name}.weight", None)  # a missing one is an error when it is read
                stored = quantizer.entries(rows, linear.columns, dtype)
                tensors.update({f"{name}.{suffix}": entry for suffix, entry in stored.items()})
    if stacked:
        layers = [_stacked(tensors, stacked) for tensors in layers]
    return [shard_bytes((name, *entry) for name, entry in tensors.items()) for tensors in (ends, *layers)]


def _stacked(tensors: dict[str, Entry], stacked: Stacked) -> dict[str, Entry]:
    """The entries of `tensors` with one of all experts in place of their modules'."""
    kinds = {name: kind for name, (kind, _) in tensors.items()}
    empty = ((name, torch.empty(shape, dtype=kinds[name], device="meta")) for name, (_, shape) in tensors.items())
    return {name: (made.dtype, tuple(made.shape)) for name, made in stack_experts(empty, stacked, device="meta")}


def matrix_bytes(quantizer: Quantizer, linear: Linear, dtype: torch.dtype) -> int:
    """Bytes of the tensors of all modules of `linear`, without the file's header."""
    total = 0
    for _, rows in linear.modules:
        for kind, shape in quantizer.entries(rows, linear.columns, dtype).values():
            total += kind.itemsize * math.prod(shape)
    return total


def stored_rest(dtype: torch.dtype, shape: tuple[int, ...], rest_dtype: torch.dtype | None) -> torch.dtype:
    """Dtype in which a tensor outside the layers is stored: matrices in `rest_dtype`, if there is one."""
    return rest_dtype if rest_dtype is not None and len(shape) > 1 else dtype


def _planned(config: ModelConfig, dtype: torch.dtype) -> dict[str, Entry]:
    """Every tensor that the checkpoint of `config` has, in `dtype`."""
    return {tensor.name: (dtype, tensor.shape) for tensor in model_tensors(config)}


def _headers(folder: Path, config: ModelConfig) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_header(path).items():
            if tensor.dtype not in DTYPES:
                raise ArtifactError(
                    f"{path}: {name} is stored as {tensor.dtype}",
                    fix=f"hone compresses checkpoints stored as {', '.join(DTYPES)}",
                )
            found[name] = (getattr(torch, DTYPES[tensor.dtype]), tensor.shape)
    weights = Shards(folder)
    if not FAMILIES[config.family].stacked:
        return {name: found[name] for name in weights.names() if name in found}
    apart = ApartExperts(weights, FAMILIES[config.family].stacked)
    kinds = {name: found[apart.stored(name)][0] for name in apart.names() if apart.stored(name) in found}
    return {name: (kind, apart.shape(name)) for name, kind in kinds.items()}
