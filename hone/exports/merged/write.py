"""Merges an adapter into the weights of its model, layer by layer, and says how much of its change the rounded sum keeps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError, SpecError
from hone.base.figure import human_bytes
from hone.base.run import Run
from hone.exports.base import need_free
from hone.exports.merged.spec import MergeSpec
from hone.model.adapters import peft
from hone.model.adapters.base import LinearAdapter
from hone.model.adapters.wrap import Adapted
from hone.model.config import ModelConfig
from hone.model.decoder import DecoderLayer, unmade
from hone.model.folder import copy_companions, model_folder, weights_bytes
from hone.model.hf import Checkpoint, part_state, save, shards_of
from hone.model.quantized.hadamard import input_hadamard
from hone.model.shards import Shards
from hone.model.weights.model import ModelSource, fused_linears
from hone.model.weights.tensors import TABLES

LEAST_KEPT = 0.5
"""The share of the adapter's change, along it, that must be left in the stored weights."""


class Merged(NamedTuple):
    """The folder, and what rounding left of the adapter's change D of the weights: R is what the stored weights changed by."""

    path: Path
    dtype: str
    kept: float
    """<R, D> / <D, D>, over all wrapped linears: 1 is all of it, 0 none."""
    error: float
    """|R - D| / |D|."""
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """The result as the command line prints it."""
        said = f"{self.path}: {human_bytes(weights_bytes(self.path))} in {self.dtype}; {self.kept:.2%} of the adapter's change of the weights is kept, "
        return "\n".join([said + f"rounding moved it by {self.error:.2%}", *(f"note: {one}" for one in self.notes)])


def merge(model: Path | str, out: Path | str, spec: MergeSpec | None = None, run: Run | None = None) -> Merged:
    """Writes the model folder or adapter folder `model`, whose model has an adapter, as the model folder `out` without it.

    Norms, embedding and head are those of its base, a tied head stays tied. A quantized base is dequantized. In memory is one layer at
    a time, in float32. Raises SpecError for a model without an adapter, for an `original` of another shape, and where the dtype
    keeps less than half of the adapter's change, ArtifactError for an `out` that exists (`run.redo` replaces it).
    """
    spec, run, out = spec or MergeSpec(), run or Run(quiet=True), Path(out)
    source = Checkpoint(model)
    if not source.config.adapters:
        raise SpecError(f"{model} has no adapter", fix="give the folder of one, or of a model with one")
    for one in source.config.adapters:
        if not isinstance(one, LinearAdapter):
            raise SpecError(
                f"'{one.kind}' is not around linears, whose weights could hold it",
                fix="use its folder as it is: hone opens it as its model with the adapter",
            )
    base = _onto(source, Path(model), spec)
    dtype = getattr(torch, spec.dtype) if spec.dtype else base.dtype
    if not run.redo:
        need_free(out)
    _replaceable(out, Path(model), base.folder)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    sums, plain = torch.zeros(3, dtype=torch.float64), base.config.model_copy(update={"adapters": ()})
    try:
        with run.progress("merge: layer", plain.num_layers) as bar:

            def advanced() -> Iterator[tuple[str, Tensor]]:
                for index, tensors in enumerate(_tensors(base, plain, dtype, run.device, sums)):
                    yield from tensors
                    bar.advance(int(0 < index <= plain.num_layers))

            save(unmade(plain), partial, None, dtype, tensors=advanced())
        along, change, apart = sums.tolist()
        if change and along < LEAST_KEPT * change:
            raise SpecError(
                f"{str(dtype).removeprefix('torch.')} keeps {along / change:.1%} of the adapter's change of the weights: rounding erases it",
                fix="take dtype=float32, or serve the adapter beside its model",
            )
        copy_companions(base.folder, partial)
        if out.exists():
            shutil.rmtree(out)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    share = (along / change, (apart / change) ** 0.5) if change else (1.0, 0.0)
    notes = ["the weights are no longer quantized"] if base.quantization else []
    return Merged(out, str(dtype).removeprefix("torch."), *share, tuple(notes))


def _replaceable(out: Path, *read: Path) -> None:
    """Raises ArtifactError for an `out` that is or holds what is read, or exists and is no model folder."""
    if any(folder.resolve().is_relative_to(out.resolve()) for folder in read):
        raise ArtifactError(f"{out} holds what the merge reads", fix="give another output folder")
    if out.exists() and not (out / "config.json").is_file():
        raise ArtifactError(f"{out} exists and is no model folder", fix="give another output folder")


def _onto(source: Checkpoint, model: Path, spec: MergeSpec) -> ModelSource:
    """The model whose linears the adapter of `source` wraps in the merge."""
    if spec.original is None:
        return source
    opened = peft.opened(model_folder(model))
    original = Checkpoint(spec.original)
    same = (original.config.layers, original.config.hidden_size) == (source.config.layers, source.config.hidden_size)
    if original.quantization or original.config.adapters or not same:
        why = (
            "is quantized"
            if original.quantization
            else "has an adapter"
            if original.config.adapters
            else "has other layers"
        )
        raise SpecError(
            f"original {spec.original} {why}", fix="give the model from which the adapter's base was quantized"
        )
    assert opened.adapter is not None, "its config has an adapter"
    config = original.config.model_copy(update={"adapters": source.config.adapters})
    shards = peft.AdaptedShards(
        shards_of(original.folder, original.config), Shards(opened.adapter, peft.weights_of(opened.adapter)), config
    )
    return ModelSource(original.folder, config, original.values, shards)


def _tensors(
    base: ModelSource, plain: ModelConfig, dtype: torch.dtype, device: str, sums: Tensor
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The tensors of each part in the order of a folder, float32; adds to `sums` <R, D>, <D, D> and |R - D|^2 of its linears."""
    ends = base.build_ends(device, torch.float32)
    yield _end(ends.embed_tokens, "embed_tokens", plain)
    for index in range(plain.num_layers):
        layer = base.build_layer(index, device, torch.float32)
        yield _layer(layer, plain, index, dtype, sums)
        base.close()
    for path in ("norm", *(["lm_head"] if "lm_head" in plain.ends() else [])):
        yield _end(ends.get_submodule(path), path, plain)


def _end(part: nn.Module, path: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    if path in TABLES and not hasattr(part, "weight"):  # codes
        yield f"{TABLES[path]}.weight", part.dequantize(torch.float32)
    else:
        yield from part_state(part, config, path)


@torch.no_grad()
def _layer(
    layer: DecoderLayer, config: ModelConfig, index: int, dtype: torch.dtype, sums: Tensor
) -> Iterator[tuple[str, Tensor]]:
    for path, names in fused_linears(config, index).items():
        module = layer.get_submodule(path)
        inner = module
        while isinstance(inner, Adapted):
            inner = inner.inner
        if input_hadamard(inner):
            raise SpecError(
                f"layers.{index}.{path} multiplies its inputs by a Hadamard matrix, which a plain linear does not",
                fix="serve the adapter beside its model",
            )
        weight = module.dequantize(torch.float32)
        if inner is not module:
            before = inner.dequantize(torch.float32)
            change = (weight - before).double()
            rest = (weight.to(dtype).float() - before).double()
            sums += torch.stack([(rest * change).sum(), change.square().sum(), (rest - change).square().sum()]).cpu()
        rows = list(names.values())
        biases = [None] * len(rows) if module.bias is None else module.bias.detach().float().flatten().split(rows)
        for name, part, bias in zip(names, weight.flatten(0, -2).split(rows), biases, strict=True):
            yield f"{name}.weight", part
            if bias is not None:
                yield f"{name}.bias", bias
    for path, name in config.singles(index).items():
        yield name, layer.get_parameter(path).detach()
