"""Opens a model some of whose layers stream: layer by layer, so that the device never holds more than it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from hone.base.figure import human_bytes
from hone.cost.serve.offload import Offload, link_rate
from hone.cost.serve.schedule import StepKind
from hone.cost.serve.serving import Serving
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint
from hone.model.parallel.random import RandomCheckpoint
from hone.model.weights.model import ModelSource
from hone.serve.offload.budget import MemoryBudget, check_cached, expert_bytes
from hone.serve.offload.experts import ExpertStream
from hone.serve.offload.pinned import check_host
from hone.serve.offload.stream import LayerStream
from hone.serve.spec import EngineSpec

_FEWER = "compress the model (hone compress), or add memory"

Made = Callable[[int, nn.Module], None]


def open_streamed(
    folder: Path, spec: EngineSpec, offload: Offload, device: torch.device
) -> tuple[Decoder, LayerStream]:
    """The model in `folder` (with `load_format` dummy: random weights), ready to serve, and its streamed layers.

    Raises FitError when the streamed layers are more than the host's free memory, MachineError when it cannot be pinned.
    """
    check_host(offload.streamed_bytes)
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    stream = LayerStream(device)

    def made(index: int, layer: nn.Module) -> None:
        if index in offload.streamed:
            stream.take(layer.requires_grad_(False))

    checkpoint: ModelSource = RandomCheckpoint(folder) if spec.load_format == "dummy" else Checkpoint(folder)
    model = _read(checkpoint, device, dtype, made)
    if offload.streamed:
        stream.open()
    return model.eval().requires_grad_(False), stream


def open_experts(folder: Path, spec: EngineSpec, device: torch.device) -> tuple[Decoder, ExpertStream]:
    """The model in `folder` with `spec.expert_offload`, ready to serve, and its experts, all of which are in host memory.

    Raises FitError when they are more than the host's free memory, SpecError as `check_cached`, MachineError when it cannot be pinned.
    """
    given = spec.expert_offload
    assert given.num_cached_experts is not None, "there is something to keep"
    facts = CheckpointFacts.of(folder)
    check_cached(facts.config, given.num_cached_experts)
    check_host(expert_bytes(facts, facts.dtype if spec.dtype == "auto" else spec.dtype), what="the experts", fix=_FEWER)
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    stream = ExpertStream(
        device, given.num_cached_experts, eviction=given.eviction, prefetch=given.prefetch == "router"
    )
    checkpoint: ModelSource = RandomCheckpoint(folder) if spec.load_format == "dummy" else Checkpoint(folder)
    model = _read(checkpoint, device, dtype, lambda _, layer: stream.take(layer.requires_grad_(False)))
    stream.open()
    return model.eval().requires_grad_(False), stream


def _read(checkpoint: ModelSource, device: torch.device, dtype: torch.dtype | None, made: Made) -> Decoder:
    """As `Checkpoint.build`; `made(index, layer)` is called for each layer before the next one is read."""
    model, ends = checkpoint.empty(), checkpoint.build_ends(device, dtype)
    model.embed_tokens, model.norm, model.lm_head = ends.embed_tokens, ends.norm, ends.lm_head
    for index in range(len(model.layers)):
        layer = model.layers[index] = checkpoint.build_layer(index, device, dtype)
        made(index, layer)
        checkpoint.close()
    model.quantization = checkpoint.quantization
    return model


def weights_on_device(model: Decoder) -> int:
    """Bytes of a model's weights on its device, each buffer counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(model)}
    return sum(storages.values())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def said_of(budget: MemoryBudget, serving: Serving, spec: EngineSpec, context: int) -> str:
    """The line about `engine.gpu_memory`: layers, bytes and seconds of a step, and whether enough tokens hide the copies.

    `serving`: the model with its streamed layers; `context`: tokens of a typical sequence. `spec` is sized.
    """
    offload, device = serving.offload, serving.machine.device
    given = f"gpu_memory {human_bytes(budget.total)}"
    total = len(budget.offload.layer_bytes)
    if offload is None:
        return f"{given}: all {total} layers stay on {device}"
    rate, bound = link_rate(serving.machine)
    copy_s = offload.copy_seconds(serving.machine).value
    assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sized() fills both in"
    one, most = (serving.computed_seconds(_decode(count, context)).value for count in (1, spec.max_num_seqs))
    where = f"{rate / 1e9:.1f} GB/s{' (data sheet, not calibrated)' if bound else ''}"
    line = (
        f"{given}: {total - len(offload.streamed)} of {total} layers stay on {device}, {len(offload.streamed)} stream "
        f"{human_bytes(offload.streamed_bytes)} a step from pinned host memory, {copy_s * 1e3:.2f} ms at {where}; predicted "
        f"{max(one, copy_s) * 1e3:.2f} ms a step of 1 sequence (computes {one * 1e3:.2f}), "
        f"{max(most, copy_s) * 1e3:.2f} of {spec.max_num_seqs} (computes {most * 1e3:.2f}), without CUDA graphs"
    )
    if most >= copy_s:
        return line
    tokens = _hidden_from(serving, copy_s, spec.max_num_batched_tokens)
    hidden = f"prompts hide the copies from about {tokens:,} tokens a step" if tokens else "no step hides the copies"
    return f"{line}: too few sequences to hide the copies, {hidden}"


def _decode(count: int, context: int) -> StepKind:
    return StepKind(count, context, (), count, 1)


def _hidden_from(serving: Serving, copy_s: float, most: int) -> int | None:
    """Tokens of a prompt's chunk, a power of 2, that compute for longer than the copies take; None beyond `most`."""
    tokens = 64
    while tokens <= most:
        if serving.computed_seconds(StepKind(0, 0, ((0, tokens),), 1, 1)).value >= copy_s:
            return tokens
        tokens *= 2
    return None
