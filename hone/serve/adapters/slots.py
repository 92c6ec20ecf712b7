"""Adapters on the device: a row of numbers for each slot, and the decoder whose linears add what the slot of each token says.

The decoder with adapters shares every weight with the one without: a step in which no sequence has an adapter runs the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn

from hone.model.decoder import Decoder
from hone.model.linear import Dense
from hone.ops import lora_expand, lora_shrink, slotted_linear
from hone.ops.lora.slots import slot_groups
from hone.serve.adapters.layout import SlotLayout, SlotLinear
from hone.serve.adapters.reading import HostAdapter


class AdapterSlots:
    """`num_slots` adapters on a device, in the dtype of the model."""

    def __init__(self, layout: SlotLayout, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.numbers = torch.zeros(num_slots, layout.size, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, len(layout.linears), layout.most_pieces, dtype=torch.int32, device=device)
        self.scales: Tensor | None = None
        """float32 [slots, num_rows, 2]; None until an adapter scales outputs or inputs."""
        self.inputs: Tensor | None = None
        """[slots, num_columns] in the model's dtype; made with `scales`."""
        self.when_scaled: list[Callable[[], None]] = []
        """Called before the first adapter that scales comes to a slot: captured passes do not."""
        self.rows: Tensor | None = None
        """int32 [T]: the slot of each token of the pass under way, -1 without an adapter."""
        self.groups: Tensor | None = None
        """Of these, what all its linears read (`slotted_linear`)."""

    @property
    def num_bytes(self) -> int:
        """Of the numbers, and of the scales once an adapter has some."""
        held = [self.numbers, self.ranks, *(one for one in (self.scales, self.inputs) if one is not None)]
        return sum(one.numel() * one.element_size() for one in held)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Brings an adapter to a slot, behind the steps that were launched. It waits for nothing where host memory is pinned."""
        self.numbers[slot].copy_(adapter.numbers, non_blocking=True)
        self.ranks[slot].copy_(adapter.ranks, non_blocking=True)
        if self.scales is None and (adapter.scales is not None or adapter.inputs is not None):
            device, layout = self.numbers.device, self.layout
            for forget in self.when_scaled:
                forget()
            self.scales = torch.tensor([1.0, 0.0], device=device).repeat(self.num_slots, layout.num_rows, 1)
            self.inputs = self.numbers.new_ones(self.num_slots, layout.num_columns)
        if self.scales is not None and self.inputs is not None:
            if adapter.scales is None:
                self.scales[slot, :, 0], self.scales[slot, :, 1] = 1.0, 0.0
            else:
                self.scales[slot].copy_(adapter.scales)
            self.inputs[slot].copy_(1.0 if adapter.inputs is None else adapter.inputs)  # type: ignore[arg-type]

    @torch.inference_mode()
    def compile_kernels(self, model: Decoder) -> None:
        """Runs the linears of a layer for few rows and many, so that no step waits until a kernel has been compiled."""
        if self.numbers.device.type != "cuda":
            return
        own = [
            one
            for one in model.modules()
            if isinstance(one, SlottedLinear) and one.place.layer == self.layout.linears[0].layer
        ]
        for count in (1, 32, 64, 128):
            with self.of(torch.zeros(count, dtype=torch.int32, device=self.numbers.device)):
                for one in own:
                    one(self.numbers.new_zeros(count, one.place.in_features))

    @contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:
        """A pass of tokens in slots `rows`."""
        self.rows = rows
        self.groups = slot_groups(rows, rank=self.layout.rank, pieces=self.layout.most_pieces)
        try:
            yield
        finally:
            self.rows = self.groups = None

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
        self._slots, self.place, self._widths = slots, place, list(place.modules.values())
        self._downs, self._ups, self._ranks = slots.factors(place)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype."""
        rows = self._slots.rows
        assert rows is not None, "a pass of the decoder with adapters has slots"
        scales, place, factors = self._slots.scales, self.place, None
        if scales is not None and self._slots.inputs is not None:
            factors = scales[:, place.row : place.row + place.out_features]
            inputs = self._slots.inputs[:, place.column : place.column + place.in_features]
            x = torch.where((rows >= 0)[:, None], x * inputs[rows.clamp(min=0)], x)
        elif type(self.inner) is Dense:
            parts = self.inner.weight, self.inner.bias, self._downs, self._ups
            return slotted_linear(x, *parts, rows, self._ranks, self._widths, groups=self._slots.groups)
        narrow = lora_shrink(x, self._downs, rows, self._ranks)
        return lora_expand(narrow, self._ups, rows, self._ranks, self.inner(x), self._widths, factors=factors)


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
