"""DeltaNet: linear attention whose state is corrected key by key (the delta rule) instead of only added to."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, NormSpec, Parameter, Piece, projection_in, projection_out
from hone.model.mixers.gated_linear import rates_and_steps, wide
from hone.model.mixers.linear_attention import Recurrent, RecurrentLayer
from hone.ops import scan_delta


class DeltaNet(Recurrent):
    """The delta rule in parallel: S_t = a_t (1 - b_t k_t^T k_t) S_(t-1) + b_t k_t^T v_t. Yang et al. 2024, arXiv:2406.06484.

    Keys of length 1, b_t = sigmoid of the token: 1 replaces the value stored for a key, 0 keeps it. With `gated` the
    state also decays by Mamba-2's scalar a_t (Gated DeltaNet, arXiv:2412.06464). Runs in plain torch, also on a GPU.
    """

    paper: ClassVar[str] = "arXiv:2406.06484"
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    value_head_dim: int | None = Field(None, gt=0, le=256, description="Width of a head's values. Default: head_dim.")
    gated: bool = Field(True, description="Whether the state also decays, by a rate per head computed from each token.")

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_head_dim or self.head_dim

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        """q, k, v, output gate, b and the decay's inputs, fused; out."""
        heads, (keys, values) = self.num_heads, self.state_shape
        widths = {"q": keys, "k": keys, "v": values, "gate": values, "beta": 1, **({"decay": 1} if self.gated else {})}
        pieces = [Piece(name, heads * width, heads) for name, width in widths.items()]
        return projection_in("qkvg", hidden_size, *pieces), projection_out(
            hidden_size, heads, values, reads=Computed("mixer.mixed")
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        norm = NormSpec("head_norm", self.state_shape[1])
        return (norm, *rates_and_steps(self.num_heads)) if self.gated else (norm,)

    def mixing_flops(self, seq_len: int) -> float:
        """The recurrence, and the read of a key's stored value before its correction."""
        rows, columns = self.state_shape
        return super().mixing_flops(seq_len) + 2.0 * self.num_heads * rows * columns

    def build(self, place: Placement) -> DeltaNetLayer:
        return DeltaNetLayer(self, place)


class DeltaNetLayer(RecurrentLayer):
    """The module behind `DeltaNet`. Between passes it keeps the state."""

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        q, k, v, gate, beta, *low = self.qkvg(x).split(self.rows["qkvg"], -1)
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (F.silu(q), F.silu(k), v))
        decay = None
        if spec.gated:
            decay = -F.softplus(wide(low[0]) + wide(self.step_bias)) * wide(self.log_rate).exp()
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        mixed, state = scan_delta(q, k, v, beta.sigmoid(), decay, state=known, reset=begins, return_state=True)
        return self.out(F.silu(gate) * self.head_norm(mixed).flatten(-2)), state
