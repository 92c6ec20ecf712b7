"""Statistics of a layer's keys and values as its cache holds them, over the calibration inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hone.compress.capture import Flow
from hone.compress.statistics import RANGES


class _Observed(nn.Module):
    """Stands where the rounding of keys and values does, and gathers statistics of them; see `observe`."""

    def __init__(self, wanted: Collection[str], num_tokens: int, *, by_head: bool) -> None:
        super().__init__()
        self.wanted = sorted(wanted)
        self.num_tokens = num_tokens
        self.by_head = by_head
        self.counts: Tensor | None = None
        """Flat mask of the batch's tokens without padding; None for all."""
        self.gathered: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [..., KV, Dh], unchanged."""
        for heads, found in zip((k, v), self.gathered, strict=True):
            flat = heads.reshape(-1, *heads.shape[-2:])
            flat = flat if self.counts is None else flat[self.counts]
            parts = flat.unbind(1) if self.by_head else (flat.flatten(1),)
            for place, part in enumerate(parts):
                if place == len(found):
                    found.append(
                        {name: RANGES[name](part.shape[1], self.num_tokens, part.device) for name in self.wanted}
                    )
                for statistic in found[place].values():
                    statistic.add(part)
        return k, v


@torch.no_grad()
def observe(
    layer: nn.Module, flow: Flow, wanted: Collection[str], *, by_head: bool
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Statistics `wanted` of the keys and of the values of `layer` on the inputs in `flow`, which stay: one set for each KV
    head, or one for all."""
    observed = _Observed(wanted, flow.calibration.num_tokens, by_head=by_head)
    layer.mixer.kv_rounding = observed
    try:
        for piece, context, counts in flow.batches():
            observed.counts = counts
            layer(flow.states[piece], context)
    finally:
        layer.mixer.kv_rounding = None
    keys, values = (
        [{name: one.value() for name, one in part.items()} for part in parts] for parts in observed.gathered
    )
    return keys, values
