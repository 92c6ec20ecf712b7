"""Makes the tensors of a wider model, one at a time, as its `Layout` says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.model.config import ModelConfig
from hone.model.decoder import draw_initial
from hone.model.growth.checkpoint import Recipe
from hone.model.growth.layout import Layout, Made, Side, Widening
from hone.model.weights.source import WeightSource


def wider(small: ModelConfig, large: ModelConfig, how: Widening, seed: int) -> dict[str, Recipe]:
    """The tensors of `large`, as `how` makes them of those of `small`."""
    layout = Layout(small, large, how, seed)
    made = layout.ends()
    for index in range(large.num_layers):
        made |= layout.layer(index)
    return {name: Wider(one, f"{seed}/growth/{name}", how.noise) for name, one in made.items()}


@dataclass(frozen=True)
class Wider:
    """One tensor, in float32. `key` seeds its random numbers; `noise` is that on copies, relative to the tensor's root mean square."""

    made: Made
    key: str
    noise: float

    @property
    def name(self) -> str:
        return self.made.name

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.made.shape

    def make(self, source: WeightSource) -> Tensor:
        made = self.made
        small = source.tensor(made.name).float()
        if made.initial is None and made.offset:
            small = small + made.offset
        found = small if made.columns is None else _taken(small, made.columns, -1)
        if made.rows is not None:
            rows = made.rows
            if made.next_name is not None and rows.later.any():
                after = source.tensor(made.next_name).float()
                after = after if made.columns is None else _taken(after, made.columns, -1)
                later = _flags(rows.later, found, 0)
                found = torch.where(later, _taken(after, rows, 0), _taken(found, rows, 0))
            else:
                found = _taken(found, rows, 0)
        if made.initial is None:  # a norm
            if made.rows is not None:
                found = torch.where(_flags(made.rows.sources < 0, found, 0), 1.0, found)
            return found - made.offset if made.offset else found
        found = self._with_noise(found, small)
        return self._with_new(found)

    def _with_noise(self, found: Tensor, small: Tensor) -> Tensor:
        """`found` with noise on the rows that are copies, and on the columns of the embedding, which has none."""
        side, axis = (self.made.rows, 0) if self.made.rows is not None else (self.made.columns, -1)
        if not self.noise or side is None or (axis == -1 and not self.name.startswith("model.embed_tokens")):
            return found
        size = self.noise * small.square().mean().sqrt().item()
        noise = torch.empty(found.shape)
        draw_initial(noise, f"{self.key}/noise", (0.0, size))
        return found + _flags(side.later, found, axis) * noise

    def _with_new(self, found: Tensor) -> Tensor:
        """`found` with its new entries: zero where a row or a column of them is to be, else random."""
        zero = random = None
        for side, axis in ((self.made.rows, 0), (self.made.columns, -1)):
            if side is None or not (side.sources < 0).any():
                continue
            zeros, new = _flags(side.zero, found, axis), _flags(side.sources < 0, found, axis)
            zero, random = (zeros, new) if zero is None or random is None else (zero | zeros, random | new)
        if zero is None or random is None:
            return found
        if bool((random & ~zero).any()):
            drawn = torch.empty(found.shape)
            assert self.made.initial is not None
            draw_initial(drawn, self.key, self.made.initial)
            found = torch.where(random, drawn, found)
        return found.masked_fill(zero.expand_as(found), 0.0)


def _taken(tensor: Tensor, side: Side, axis: int) -> Tensor:
    """The entries of `side` along `axis`, each times its factor; new ones have any value."""
    places = torch.from_numpy(side.sources.clip(min=0))
    factor = torch.tensor(side.factor, dtype=torch.float32)
    found = tensor.index_select(axis, places)
    return found * (factor.view(-1, *[1] * (tensor.dim() - 1)) if axis == 0 else factor)


def _flags(flags: object, like: Tensor, axis: int) -> Tensor:
    """Flags along `axis`, as a bool tensor that broadcasts to `like`."""
    found = torch.tensor(flags, dtype=torch.bool)
    return found.view(-1, *[1] * (like.dim() - 1)) if axis == 0 else found
