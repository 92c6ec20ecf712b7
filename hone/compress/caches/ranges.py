"""Statistics of a layer's keys and values as its cache holds them, over the calibration inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hone.compress.capture import Flow
from hone.compress.statistics import RANGES
from hone.compress.step import Ranges


class _Observed(nn.Module):
    """Stands where the rounding of keys and values does, and gathers statistics of them; see `observe`."""

    def __init__(self, gathered: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
        super().__init__()
        self.gathered = gathered
        self.counts: Tensor | None = None
        """Flat mask of the batch's tokens without padding; None for all."""

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [..., KV, Dh], unchanged."""
        for heads, found in zip((k, v), self.gathered, strict=True):
            flat = heads.reshape(-1, *heads.shape[-2:])
            flat = flat if self.counts is None else flat[self.counts]
            parts = flat.unbind(1) if len(found) > 1 else (flat.flatten(1),)
            for part, statistics in zip(parts, found, strict=True):
                for statistic in statistics.values():
                    statistic.add(part)
        return k, v


@torch.no_grad()
def observe(layer: nn.Module, heads: tuple[int, int], flow: Flow, wanted: Collection[str], *, by_head: bool) -> Ranges:
    """Statistics `wanted` of the keys and of the values of `layer` on the inputs in `flow` of all ranks, which stay: one set
    for each KV head, or one for all. `heads`: number of KV heads and their channels."""
    sets, columns = heads if by_head else (1, heads[0] * heads[1])
    options = (columns, flow.calibration.num_tokens, torch.device(flow.device), flow.before)
    gathered = tuple([{name: RANGES[name](*options) for name in sorted(wanted)} for _ in range(sets)] for _ in "kv")
    observed = _Observed(gathered)
    layer.mixer.kv_rounding = observed
    try:
        for piece, context, counts in flow.batches():
            observed.counts = counts
            layer(flow.states[piece], context)
    finally:
        layer.mixer.kv_rounding = None
    for part in (*gathered[0], *gathered[1]):
        for statistic in part.values():
            statistic.merge(flow.mesh)
    keys, values = ([{name: one.value() for name, one in part.items()} for part in parts] for parts in gathered)
    return keys, values
