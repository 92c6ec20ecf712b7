"""More layers: which layer of the smaller model each one is a copy of, and which of them add nothing to the residual stream yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.model.config import ModelConfig
from hone.model.growth.base import silencing
from hone.model.weights.tensors import end_tensors, layer_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.growth.checkpoint import Recipe
    from hone.model.weights.source import WeightSource


@dataclass(frozen=True)
class Copied:
    """Tensor `name` of the source as it is, or with `value` in every place of it."""

    name: str
    value: float | None = None

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return source.shape(self.name)

    def make(self, source: WeightSource) -> Tensor:
        stored = source.tensor(self.name)
        return stored if self.value is None else stored.new_full(stored.shape, self.value)


def deeper(
    small: ModelConfig, large: ModelConfig, order: Sequence[int], silent: frozenset[int] = frozenset()
) -> dict[str, Recipe]:
    """The tensors of `large`, whose layers are those of `small` at `order`; those at the places `silent` add zero."""
    recipes: dict[str, Recipe] = {one.name: Copied(one.name) for one in end_tensors(large)}
    for place, index in enumerate(order):
        recipes |= _layer(small, large, index, place, silent=place in silent)
    return recipes


def _layer(small: ModelConfig, large: ModelConfig, index: int, place: int, *, silent: bool) -> dict[str, Recipe]:
    """The tensors of layer `place`, a copy of layer `index`."""
    zeros = silencing(large, place) if silent else {}
    pairs = zip(layer_tensors(large, place), layer_tensors(small, index), strict=True)
    return {made.name: Copied(source.name, zeros.get(made.path)) for made, source in pairs}
