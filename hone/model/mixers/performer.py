"""Performer: softmax attention estimated by random features (FAVOR+), as a causal running sum."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import LinearSpec
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer, qkv_and_out, weighted_mean
from hone.model.rope import Rope
from hone.ops import rope


class Performer(Recurrent):
    """Softmax attention in linear time: exp(q . k) as the mean of m positive random features. Choromanski et al. 2020, arXiv:2009.14794.

    The features are orthogonal in blocks of head_dim, drawn from `seed` and the layer's index. A running maximum over
    the keys keeps their exponentials in range: when it rises, the state is scaled down. Nothing depends on later
    tokens.
    """

    paper: ClassVar[str] = "arXiv:2009.14794"
    by_layer: ClassVar[bool] = True
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    num_features: int | None = Field(
        None,
        gt=0,
        le=256,
        description="Random features m; more give a better estimate. Default: twice head_dim, at most 256.",
    )
    seed: int = Field(0, ge=0, description="Seed of the random features.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @model_validator(mode="after")
    def _pairs(self) -> Performer:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels")
        return self

    @property
    def features(self) -> int:
        return self.num_features or min(256, 2 * self.head_dim)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.features, self.head_dim + 1  # and the sum of the keys' features

    def state_values(self, seq_len: int) -> float:
        return super().state_values(seq_len) + self.num_heads  # and the maximum so far

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        return qkv_and_out(self, hidden_size)

    def mixing_flops(self, seq_len: int) -> float:
        """The features of a query and a key, then the recurrence."""
        return 4.0 * self.num_heads * self.features * self.head_dim + super().mixing_flops(seq_len)

    def build(self, place: Placement) -> PerformerLayer:
        return PerformerLayer(self, place)


class PerformerLayer(RecurrentLayer):
    """The module behind `Performer`. Between passes it keeps (state, maximum over the keys so far [B, H])."""

    def __init__(self, spec: Performer, place: Placement) -> None:
        super().__init__(spec, place)
        self._directions: Tensor | None = None

    def draw(self, context: Context, x: Tensor) -> Tensor:
        """The features' directions [m, Dh] on x's device, kept for the next pass."""
        spec, kept = self.spec, self._directions
        wide = torch.promote_types(x.dtype, torch.float32)  # exponents need more precision than 16-bit floats have
        if kept is None or kept.device != x.device or kept.dtype != wide:
            with torch.inference_mode(False):  # no inference tensors: a model that is scored first may be trained later
                made = orthogonal_features(spec.features, spec.head_dim, spec.seed + 1_000_003 * self.layer)
                kept = self._directions = made.to(x.device, wide)
        return kept

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Any
    ) -> tuple[Tensor, Any]:
        spec = self.spec
        state, highest = (None, None) if known is None else known
        q, k, v = self.qkv(x).unflatten(-1, (3, spec.num_heads, -1)).unbind(-3)
        cos, sin = context.rotary(spec.rope, spec.head_dim, x.dtype)
        directions = self.draw(context, x)
        q, k = (rope(part, cos, sin).to(directions.dtype) * spec.head_dim**-0.25 for part in (q, k))
        # exp(q . k) = mean over w of exp(w . q - q^2/2) exp(w . k - k^2/2); a factor of the query's own cancels out.
        of_q = q @ directions.T
        of_k = k @ directions.T - k.square().sum(-1, keepdim=True) / 2
        with torch.no_grad():  # the result does not depend on the maxima, so neither does its gradient
            peaks = of_k.amax(-1)
            maxima = running_max(peaks, begins, highest)
            before = torch.cat((maxima[:, :1] if highest is None else highest[:, None], maxima[:, :-1]), 1)
            falls = (before - maxima).clamp_max(0)  # where a document begins there is no state to scale
        of_q = (of_q - of_q.detach().amax(-1, keepdim=True)).exp().to(v.dtype)
        of_k = (of_k - maxima[..., None]).exp().to(v.dtype)
        mixed, state = weighted_mean(of_q, of_k, v, positions, falls, begins, state)
        return self.out(mixed.flatten(-2)), (state, maxima[:, -1])


def orthogonal_features(num_features: int, head_dim: int, seed: int) -> Tensor:
    """Directions [m, Dh] float64: orthogonal in blocks of Dh, with the lengths of normal vectors, from `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-num_features // head_dim)):
        basis, corner = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64))
        blocks.append((basis * corner.diagonal().sign()).T)
    lengths = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64).norm(dim=1)
    return torch.cat(blocks)[:num_features] * lengths[:, None]


def running_max(x: Tensor, begins: Tensor | None, before: Tensor | None) -> Tensor:
    """max over t <= s of x [B, S, H] within documents; `begins` bool [B, S], `before` [B, H] the maximum of earlier passes."""
    if before is not None:
        first = torch.maximum(x[:, 0], before)
        if begins is not None:
            first = torch.where(begins[:, :1], x[:, 0], first)
        x = torch.cat((first[:, None], x[:, 1:]), 1)
    if begins is None:
        return x.cummax(1).values
    closed = begins[..., None]  # a maximum from further back than the document's start belongs to another document
    reach = 1
    while reach < x.shape[1]:
        longer = torch.maximum(x[:, reach:], x[:, :-reach])
        x = torch.cat((x[:, :reach], torch.where(closed[:, reach:], x[:, reach:], longer)), 1)
        closed = torch.cat((closed[:, :reach], closed[:, reach:] | closed[:, :-reach]), 1)
        reach *= 2
    return x
