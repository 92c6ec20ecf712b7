"""Experts divided whole over the ranks of a stage: each computes its own experts' visits of all tokens, and the layer's sum joins them.

Tensor-parallel ranks have the same tokens in front of a feed-forward, so nothing is sent to an expert's rank (Rajbhandari et al. 2022,
arXiv:2201.05596, call it expert parallelism without data parallelism). An expert may have copies on several ranks; a hash of the
token and its position says which copy computes a visit, so that a request's text does not depend on what else is in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.block import Placement
from hone.model.config import ModelConfig
from hone.model.context import Context
from hone.model.feed_forwards.moe import MoE, MoELayer
from hone.model.linear import ExpertLinears
from hone.model.linear_spec import LinearSpec
from hone.model.parallel.cut import Cut
from hone.model.routers.routes import ByToken, Routes
from hone.ops import permute, unpermute
from hone.ops.moe.local import LocalExperts
from hone.parallel.place import Place

Slots = Mapping[int, Sequence[int]]
"""By layer, the expert whose weights each slot has: the slots of rank 0 first, as many on every rank."""


class PlacedMoE(MoE):
    """The part of a `MoE` that one rank holds: whole experts, and its columns of the shared ones."""

    slots: tuple[int, ...] = Field(description="The expert of each slot, over all ranks.")
    rank: int = Field(ge=0, description="This rank.")
    num_ranks: int = Field(gt=0, description="Ranks that divide the slots.")

    @property
    def num_slots(self) -> int:
        """Experts whose weights this rank has."""
        return len(self.slots) // self.num_ranks

    @property
    def own(self) -> tuple[int, ...]:
        """The experts of this rank's slots."""
        return self.slots[self.rank * self.num_slots : (self.rank + 1) * self.num_slots]

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        visits = max(self.router.visits(self.num_experts) / self.num_ranks, 1.0)  # a step waits for the busiest rank
        share = min(visits / self.num_slots, 1.0)
        return tuple(
            one.local(self.rank, self.num_ranks)
            if one.experts is None
            else replace(one, experts=self.num_slots, share=share, shard="none")
            for one in super().linears(hidden_size)
        )

    def build(self, place: Placement) -> PlacedMoELayer:
        return PlacedMoELayer(self, place)


class PlacedMoELayer(MoELayer):
    """The module behind `PlacedMoE`; its output is a part of the sum over ranks. `arrange` it before the first pass."""

    spec: PlacedMoE
    counts: Tensor | None = None
    """int64 [E]: visits of each expert that tokens asked for since the last time it was read; None: not counted."""

    def __init__(self, spec: PlacedMoE, place: Placement) -> None:
        super().__init__(spec, place)
        self.local_share = 1.0 / spec.num_ranks

    def arrange(self, slots: Sequence[int], device: torch.device | str) -> None:
        """Says which slots have which experts. Later calls, with as many slots, write to the same memory."""
        spec = self.spec
        places: list[list[int]] = [[] for _ in range(spec.num_experts)]
        for slot, expert in enumerate(slots):
            places[expert].append(slot)
        most = len(slots) - spec.num_experts + 1
        first = spec.rank * spec.num_slots
        local = [
            [one - first if 0 <= one - first < spec.num_slots else spec.num_slots for one in row] for row in places
        ]
        rows = [row + row[:1] * (most - len(row)) for row in local]
        here = torch.tensor(rows, device=device, dtype=torch.int32)
        copies = torch.tensor([len(row) for row in places], device=device, dtype=torch.int32)
        if getattr(self, "_here", None) is None:
            self.register_buffer("_here", here, persistent=False)
            self.register_buffer("_copies", copies, persistent=False)
        else:
            self._here.copy_(here)
            self._copies.copy_(copies)
        self.spec = spec.model_copy(update={"slots": tuple(slots)})

    def count(self) -> None:
        """Counts visits from now on."""
        self.counts = torch.zeros(self.spec.num_experts, dtype=torch.int64, device=self._here.device)

    def local(self, context: Context) -> LocalExperts:
        """Which slot computes a visit, as this rank sees it."""
        key = real = None
        if self._here.shape[1] > 1 or self.counts is not None:
            if "local experts" not in context.memo:  # the same in every layer
                key = context.positions if context.tokens is None else context.positions + context.tokens
                real = context.real
                context.memo["local experts"] = key.reshape(-1), None if real is None else real.reshape(-1)
            key, real = context.memo["local experts"]
        return LocalExperts(self._here, self._copies, self.spec.num_slots, key, self.counts, real)

    def _routes(self, tokens: Tensor, x: Tensor, context: Context) -> Routes:
        routes = super()._routes(tokens, x, context)
        assert isinstance(routes, ByToken) and not routes.leaves_out, "serving takes routers by token and drops none"
        slots = self.local(context).slots_of(routes.ids)
        cuts = not x.is_cuda or isinstance(self.down, ExpertLinears)  # these wait for the counts anyway
        return HeldRoutes(slots, routes.weights, self.spec.num_slots, routes.scores, leaves_out=True, cuts=cuts)


@dataclass
class HeldRoutes(ByToken):
    """`ByToken` of one rank's slots; visits of other ranks' experts are nobody's. Unless it `cuts`, no count is read from the device."""

    cuts: bool = False
    """Whether rows that are nobody's are left out of the products' input; else kernels skip them by the ends of the experts' rows."""

    def dispatch(self, x: Tensor, pieces: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        if self.cuts:
            return super().dispatch(x, pieces)
        rows, self._ends, self._place = permute(x, self.ids, self.num_experts, leaves_out=True)
        return rows, self._ends

    def combine(self, made: Tensor) -> Tensor:
        if self.cuts:
            return super().combine(made)
        return unpermute(made, self._place, self.weights, ends=self._ends)


def even_slots(config: ModelConfig, num_ranks: int, num_redundant: int = 0) -> dict[int, tuple[int, ...]]:
    """Slots of every layer with experts without any loads: experts in order, `num_redundant` first ones once more.

    Raises SpecError where the slots cannot be divided among the ranks, or there are more copies than experts.
    """
    found = {}
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.feed_forward, MoE):
            continue
        count = layer.feed_forward.num_experts
        total = count + num_redundant
        if total % num_ranks or num_redundant > count:
            fits = next(more for more in range(num_ranks) if (count + more) % num_ranks == 0)
            raise SpecError(
                f"layer {index}: {count} experts and {num_redundant} redundant ones cannot be divided among {num_ranks} ranks",
                fix=f"set eplb_config.num_redundant_experts={fits}, or enable_expert_parallel=false",
            )
        # Slot i of all is expert i % count; a rank's slots are neighbours.
        found[index] = tuple(slot % count for slot in range(total))
    if not found:
        raise SpecError("the model has no experts to divide", fix="set enable_expert_parallel=false")
    return found


def place_experts(whole: ModelConfig, place: Place, slots: Slots) -> ModelConfig:
    """The config of one rank: `ModelConfig.local`, but for whole experts. Raises SpecError where something else cannot be divided."""
    layers, size = [], place.tensor_size
    for index, layer in enumerate(whole.layers):
        fed = layer.feed_forward
        if index not in slots:
            layers.append(layer.local(size))
            continue
        assert isinstance(fed, MoE)
        if not fed.router.by_token:
            raise SpecError(
                f"layer {index} routes by '{fed.router.kind}': its experts choose tokens and cannot be divided",
                fix="set enable_expert_parallel=false",
            )
        fields = {name: getattr(fed, name) for name in MoE.model_fields}
        placed = PlacedMoE(**fields, slots=tuple(slots[index]), rank=place.tensor_rank, num_ranks=size)
        placed.linears(whole.hidden_size)  # shared experts must divide
        layers.append(layer.model_copy(update={"mixer": layer.mixer.local(size), "feed_forward": placed}))
    return whole.model_copy(update={"layers": tuple(layers)})


def expert_cuts(linear: LinearSpec, modules: Mapping[str, int], experts: Sequence[int]) -> list[Cut]:
    """The rows of `experts`, in this order, of the checkpoint modules of a linear of all experts (their names and rows, in order)."""
    ends, end = [], 0
    for module, count in modules.items():
        ends.append((module, end, count))
        end += count
    found = []
    for expert in experts:
        begin = expert * linear.out_features
        for piece in linear.pieces:
            stop = begin + piece.out_features
            module, first, count = next(one for one in ends if one[1] <= begin and stop <= one[1] + one[2])
            columns = slice(0, linear.in_features)
            found.append(Cut(module, count, (slice(begin - first, stop - first),), linear.in_features, columns))
            begin = stop
    return found
