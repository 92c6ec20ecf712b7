"""Makes the tensors of experts, one at a time, of those of the dense feed-forwards that they are copies of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hone.model.config import ModelConfig
from hone.model.decoder import draw_initial
from hone.model.growth.checkpoint import Recipe
from hone.model.growth.depth import Copied
from hone.model.linear_spec import INIT_STD
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor, Module, end_tensors, layer_modules, layer_tensors

_BLOCK = "feed_forward."


class Copying(Protocol):
    """A technique that makes experts of copies, as `hone.model.growth.upcycle.Upcycle` is."""

    num_experts: int
    granularity: int
    num_shared_experts: int
    shared_gate: bool
    noise_std: float
    reinitialize: float

    @property
    def weight_sum(self) -> float: ...
    def has_experts(self, index: int) -> bool: ...


def upcycled(small: ModelConfig, large: ModelConfig, how: Copying, seed: int) -> dict[str, Recipe]:
    """The tensors of `large`, which is `small` with experts in the layers where `how` says so; random numbers are those of `seed`."""
    recipes: dict[str, Recipe] = {one.name: Copied(one.name) for one in end_tensors(large)}
    for index in range(large.num_layers):
        experts = how.has_experts(index)
        made, given = (
            [one for one in layer_tensors(config, index) if not (experts and one.path.startswith(_BLOCK))]
            for config in (large, small)
        )
        recipes |= {new.name: Copied(old.name) for new, old in zip(made, given, strict=True)}
        if experts:
            recipes |= _Layer(small, large, index, how, seed).recipes()
    return recipes


@dataclass(frozen=True)
class Part:
    """A tensor of an expert: the slices `places` of axis `axis` of tensor `name`, each times its factor, one after another.

    `noise` is the deviation of what is added, relative to their root mean square; `anew` the channels, along `axis`, that are drawn
    anew with the mean and the deviation of what they were; `key` seeds both.
    """

    name: str
    shape_made: tuple[int, ...]
    axis: int
    places: tuple[slice, ...]
    factors: tuple[float, ...]
    key: str
    noise: float = 0.0
    anew: tuple[int, ...] = ()

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.shape_made

    def make(self, source: WeightSource) -> Tensor:
        dense = source.tensor(self.name).float()
        parts = (
            dense.narrow(self.axis, place.start, place.stop - place.start) * factor
            for place, factor in zip(self.places, self.factors, strict=True)
        )
        found = torch.cat(list(parts), self.axis)
        if self.noise:
            found = found + self._drawn("noise", found, (0.0, self.noise * found.square().mean().sqrt().item()))
        if self.anew:
            places = torch.tensor(self.anew)
            old = found.index_select(self.axis, places)
            new = self._drawn("anew", old, (old.mean().item(), old.std().item()))
            found.index_copy_(self.axis, places, new)
        return found

    def _drawn(self, what: str, like: Tensor, initial: tuple[float, float]) -> Tensor:
        drawn = torch.empty(like.shape)
        draw_initial(drawn, f"{self.key}/{what}", initial)
        return drawn


@dataclass(frozen=True)
class Rows:
    """A router [E, D] in float32: a row is drawn for each copy, and all `repeats` parts of it have that one. 0 repeats: zeros."""

    name: str
    shape_made: tuple[int, ...]
    key: str
    repeats: int = 0

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.shape_made

    def make(self, source: WeightSource) -> Tensor:
        if not self.repeats:
            return torch.zeros(self.shape_made)
        rows = torch.empty(self.shape_made[0] // self.repeats, *self.shape_made[1:])
        draw_initial(rows, self.key, (0.0, INIT_STD))
        return rows.repeat_interleave(self.repeats, 0)


class _Layer:
    """The tensors of the feed-forward of layer `index`. Expert e is a copy of part e % G; the next G experts are the next copy."""

    def __init__(self, small: ModelConfig, large: ModelConfig, index: int, how: Copying, seed: int) -> None:
        self.large, self.index, self.how = large, index, how
        self.dense = [one for one in layer_modules(small, index) if one.path.startswith(_BLOCK)]
        self.width = large.layers[index].feed_forward.intermediate_size
        self.key = f"{seed}/growth/layers.{index}"
        shared = [part % how.granularity for part in range(how.num_shared_experts)]
        self.shared = tuple(shared)
        self.halves = [1 / (1 + shared.count(part)) for part in range(how.granularity)]
        """What each copy of a part has of it: the routed ones together one, and every shared one as much."""

    def recipes(self) -> dict[str, Recipe]:
        found = (one for one in layer_tensors(self.large, self.index) if one.path.startswith(_BLOCK))
        return {one.name: self._recipe(one) for one in found}

    def _recipe(self, made: DeclaredTensor) -> Recipe:
        anchor, module = f"{self.dense[0].name}.weight", made.module
        if made.path == f"{_BLOCK}router":
            return Rows(anchor, made.shape, f"{self.key}.router", self.how.granularity)
        if (
            module is None or made.path == f"{_BLOCK}shared_weight"
        ):  # a bias of the choice; sigmoid(0) = 1/2 of every token
            return Rows(anchor, made.shape, self.key)
        if module.linear.experts is None:
            gate = 2.0 if self.how.shared_gate else 1.0
            return self._part(module, made, self.shared, module.rows.start, gate, "")
        expert = module.rows.start // module.linear.out_features
        sum_to = self.how.granularity / self.how.weight_sum
        begin = module.rows.start - expert * module.linear.out_features
        return self._part(module, made, (expert % self.how.granularity,), begin, sum_to, f".experts.{expert}")

    def _part(
        self, module: Module, made: DeclaredTensor, parts: tuple[int, ...], begin: int, factor: float, expert: str
    ) -> Part:
        """The piece of `module` at row `begin` of its linear: these `parts` of the dense feed-forward's piece of the same name."""
        name = next(piece.name for piece, first in _begins(module) if first == begin).removeprefix("shared_")
        source, first = self._source(name)
        axis, down = (1, True) if name == "down" else (0, False)
        offset = 0 if down else first
        places = tuple(slice(offset + part * self.width, offset + (part + 1) * self.width) for part in parts)
        factors = tuple(factor * self.halves[part] if down else 1.0 for part in parts)
        key, how = f"{self.key}{expert}", self.how
        anew = self._anew(key) if expert and how.reinitialize else ()
        noise = how.noise_std if expert else 0.0
        return Part(f"{source.name}.weight", made.shape, axis, places, factors, f"{key}.{name}", noise, anew)

    def _source(self, piece: str) -> tuple[Module, int]:
        """The dense module that holds `piece`, and the row at which it begins there."""
        for module in self.dense:
            for one, first in _begins(module):
                if one.name == piece and module.rows.start <= first < module.rows.stop:
                    return module, first - module.rows.start
        raise AssertionError(f"a dense feed-forward has no {piece}")

    def _anew(self, key: str) -> tuple[int, ...]:
        """The channels of an expert that are drawn anew: the same in its gate, up and down."""
        order = torch.empty(self.width)
        draw_initial(order, f"{key}.channels", (0.0, 1.0))
        return tuple(sorted(order.argsort()[: round(self.how.reinitialize * self.width)].tolist()))


def _begins(module: Module) -> Iterator[tuple]:
    """The pieces of the linear of a module (of one expert), each with its first row."""
    begin = 0
    for piece in module.linear.pieces:
        yield piece, begin
        begin += piece.out_features
