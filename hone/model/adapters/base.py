"""What an adapter is: a wrapper around linears, chosen by target_modules, as a spec that declares its own weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from hone.base.table import Technique
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import nn

Wrappers = list[tuple["Adapter", tuple[Piece, ...]]]
"""Adapters of one linear, the first innermost, each with the pieces it wraps."""


class Adapter(Technique):
    """Base of every adapter's spec: which linears of the layers it wraps, its parameters beside them, and the wrapper."""

    target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        description="Checkpoint modules it wraps, by the end of their names ('q_proj', 'mlp.down_proj'), or all-linear.",
    )

    def targets(self, module: str) -> bool:
        """Whether it wraps checkpoint module `module` ('model.layers.0.self_attn.q_proj')."""
        ends = self.target_modules
        return "all-linear" in ends or any(module == end or module.endswith(f".{end}") for end in ends)

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        """What it adds to `linear`, of which it wraps `pieces`."""
        raise NotImplementedError

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> nn.Module:
        """The module that takes the place of `inner`, an `hone.model.adapters.wrap.Adapted`."""
        raise NotImplementedError


def wrappers(adapters: Iterable[Adapter], linear: LinearSpec, modules: Iterable[str]) -> Wrappers:
    """Those of `adapters` that target a checkpoint module of `linear`; `modules` are its, in order of `linear.parts`."""
    names = list(zip(linear.parts, modules, strict=True))
    found: Wrappers = []
    for adapter in adapters:
        hit = {part.rpartition(".")[2] for part, module in names if adapter.targets(module)}
        if hit:
            found.append((adapter, tuple(piece for piece in linear.pieces if piece.name in hit)))
    return found
