"""Adapters on the device: a row of numbers for each slot, and the decoder whose linears add what the slot of each token says.

The decoder with adapters shares every weight with the one without: a step in which no sequence has an adapter runs the latter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn

from hone.model.decoder import Decoder
from hone.ops import lora_expand, lora_shrink
from hone.serve.adapters.layout import SlotLayout, SlotLinear
from hone.serve.adapters.reading import HostAdapter


class AdapterSlots:
    """`num_slots` adapters on a device, in the dtype of the model."""

    def __init__(self, layout: SlotLayout, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.numbers = torch.zeros(num_slots, layout.size, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, len(layout.linears), layout.most_pieces, dtype=torch.int32, device=device)
        self.rows: Tensor | None = None
        """int32 [T]: the slot of each token of the pass under way, -1 without an adapter."""

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size() + self.ranks.numel() * 4

    @torch.inference_mode()
    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Brings an adapter to a slot, behind the steps that were launched. It waits for nothing where host memory is pinned."""
        self.numbers[slot].copy_(adapter.numbers, non_blocking=True)
        self.ranks[slot].copy_(adapter.ranks, non_blocking=True)

    @contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:
        """A pass of tokens in slots `rows`."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def factors(self, place: SlotLinear) -> tuple[Tensor, Tensor, Tensor]:
        """A [slots, P R, K], s B [slots, N, R] and ranks [slots, P] of a linear, as views."""
        rank, pieces = self.layout.rank, len(place.modules)
        downs = self.numbers[:, place.down : place.up].unflatten(1, (pieces * rank, place.in_features))
        end = place.up + place.out_features * rank
        ups = self.numbers[:, place.up : end].unflatten(1, (place.out_features, rank))
        return downs, ups, self.ranks[:, place.index, :pieces]


class SlottedLinear(nn.Module):
    """A linear of the base model, to whose outputs the factors of each token's slot are added."""

    def __init__(self, inner: nn.Module, slots: AdapterSlots, place: SlotLinear) -> None:
        super().__init__()
        self.inner = inner
        self._slots, self._widths = slots, list(place.modules.values())
        self._downs, self._ups, self._ranks = slots.factors(place)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype."""
        rows = self._slots.rows
        assert rows is not None, "a pass of the decoder with adapters has slots"
        narrow = lora_shrink(x, self._downs, rows, self._ranks)
        return lora_expand(narrow, self._ups, rows, self._ranks, self.inner(x), self._widths)


def with_slots(decoder: Decoder, slots: AdapterSlots) -> Decoder:
    """A decoder that shares all weights and parts of `decoder` but for its linears, which add the factors in `slots`."""
    found = _shallow(decoder)
    layers = nn.ModuleList()
    for index, layer in enumerate(decoder.layers):
        own = _shallow(layer)
        for block in ("mixer", "feed_forward"):
            setattr(own, block, _shallow(getattr(layer, block)))
        for place in slots.layout.linears:
            if place.layer == index:
                block, name = place.path.split(".")
                part = getattr(own, block)
                setattr(part, name, SlottedLinear(getattr(part, name), slots, place))
        layers.append(own)
    found.layers = layers
    return found


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same parts, of which others may be put in their place without a change to `module`."""
    found = copy(module)
    found.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    return found
