"""Layers through their segments: kept, recomputed, recomputed but for products, or with what they save on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hone.cost.activations.segments import Segment, again
from hone.model.context import Context
from hone.train.activation_checkpointing.copies import Copies
from hone.train.activation_checkpointing.selective import contexts


def run_layers_in(layers: Sequence[Any], x: Tensor, context: Context, segments: Sequence[Segment]) -> Tensor:
    """x [B, S, D] through the layers of `segments`; without gradients nothing is kept anyway."""
    if not torch.is_grad_enabled():
        for segment in segments:
            x = _through([layers[index] for index in range(segment.start, segment.stop)], x, context, segment.start)
        return x
    copies = Copies(x.device) if any(one.to_host for one in segments) else None
    for segment in segments:
        with copies.group() if copies is not None and segment.to_host else nullcontext():
            x = _run(layers, segment, x, context)
    return x


def _run(layers: Sequence[Any], segment: Segment, x: Tensor, context: Context) -> Tensor:
    own = [layers[index] for index in range(segment.start, segment.stop)]
    if not segment.recompute:
        return _through(own, x, context, segment.start)
    keeps = contexts(own) if segment.saves == "products" else noop_context_fn
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": keeps}
    if segment.inner:
        return checkpoint(run_layers_in, layers, x, context, again(segment), **options)
    return checkpoint(_through, own, x, context, segment.start, **options)


def _through(layers: Sequence[Any], x: Tensor, context: Context, first: int) -> Tensor:
    """x through `layers`, of which the first has index `first`. What a context taps of them is that of the first pass, not of one again."""
    for index, layer in enumerate(layers, first):
        x = layer(x, context)
        if context.taps is not None and context.taps.get(index, x) is None:
            context.taps[index] = x
    return x
