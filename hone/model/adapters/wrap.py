"""Modules that wrap linears, and the maker that builds them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hone.model.adapters.base import Wrappers
from hone.model.linear import MakeLinear
from hone.model.linear_spec import LinearSpec, Piece


class Adapted(nn.Module):
    """Base of the wrappers: `inner` keeps its weights and their names in checkpoints; a subclass writes `forward`.

    It has every parameter that the spec declares as an attribute of that name.
    """

    def __init__(self, spec: Any, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        self.spec = spec
        self.inner = inner
        self.linear = linear
        self.pieces = pieces
        for part in spec.parameters(linear, pieces):
            setattr(self, part.name, nn.Parameter(torch.empty(part.shape)))

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """The pieces of all rows in order, wrapped or not."""
        whole = sum(piece.out_features for piece in self.pieces) == self.linear.out_features
        return self.pieces if whole else self.linear.pieces

    def rows(self) -> list[tuple[Piece, slice]]:
        """All pieces, each with its rows."""
        ends = list(accumulate(piece.out_features for piece in self.all_pieces))
        return [(piece, slice(end - piece.out_features, end)) for piece, end in zip(self.all_pieces, ends, strict=True)]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight in `dtype` as the forward pass multiplies it, the adapter's part included."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The stored weight of `inner`."""
        return self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        return self.inner.bias

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def integers(self) -> frozenset[str]:
        return self.inner.integers

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        self.inner.load(parts)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        return self.inner.parts(rows)

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        return self.inner.part_shapes(rows)


def adapted(make: MakeLinear, choose: Callable[[str, LinearSpec], Wrappers]) -> MakeLinear:
    """A maker that wraps every linear of `make` in the adapters of `choose(name, spec)`."""

    def wrapping(name: str, spec: LinearSpec) -> nn.Module:
        linear = make(name, spec)
        for adapter, pieces in choose(name, spec):
            linear = adapter.wrap(linear, spec, pieces)
        return linear

    return wrapping
