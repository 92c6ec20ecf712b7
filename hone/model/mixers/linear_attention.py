"""Linear attention: softmax replaced by a feature map, so that a running sum replaces the keys and values of all earlier tokens.

Also the base of every mixer over `hone.ops.scan`: a state per head instead of keys, separate documents, and a state
carried from pass to pass.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import LinearSpec, grouped_pieces, projection_in, projection_out
from hone.model.mixer import Mixer
from hone.ops import scan


class Recurrent(Mixer):
    """Base of mixers whose state is one matrix per head: constant memory for any length, work linear in the length."""

    complexity: ClassVar[str] = "O(S)"

    num_heads: int = Field(gt=0, description="Heads, each with its own state.")
    head_dim: int = Field(gt=0, le=256, description="Width of a head's queries and keys.")

    @property
    def state_shape(self) -> tuple[int, int]:
        """Rows (keys) and columns (values) of a head's state."""
        return self.head_dim, self.head_dim

    def mixing_flops(self, seq_len: int) -> float:
        """The recurrence: k^T v into the state, q times the state. Chunked kernels spend more to be faster."""
        rows, columns = self.state_shape
        return 4.0 * self.num_heads * rows * columns

    def state_values(self, seq_len: int) -> float:
        """One state per head for any length."""
        rows, columns = self.state_shape
        return float(self.num_heads * rows * columns)


def qkv_and_out(spec: Recurrent, hidden_size: int) -> tuple[LinearSpec, ...]:
    """The linears of a mixer whose queries, keys and values have heads of one width."""
    heads, head_dim = spec.num_heads, spec.head_dim
    return (
        projection_in("qkv", hidden_size, *grouped_pieces(heads, heads, head_dim)),
        projection_out(hidden_size, heads, head_dim),
    )


class RecurrentLayer(Block):
    """Base of their modules. `forward(x [B, S, D], context) -> [B, S, D]`; a subclass writes `mix`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if x.dim() == 2:
            return self.forward(x[None], context)[0]
        positions = context.positions.expand(x.shape[:2])
        begins = positions == 0 if context.document_ids is not None else None
        known = None if context.carry is None else context.carry.get(self.layer)
        out, left = self.mix(x, context, positions, begins, known)
        if context.carry is not None:
            context.carry[self.layer] = left
        return out

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Any
    ) -> tuple[Tensor, Any]:
        """(output, state for the next pass). `begins` bool [B, S]: a document starts here; `known`: the state of the last pass."""
        raise NotImplementedError


def weighted_mean(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, decay: Tensor | None, begins: Tensor | None, state: Any
) -> tuple[Tensor, Tensor]:
    """sum_t (q_s . k_t) v_t / sum_t (q_s . k_t) over a document's tokens t <= s, for features q, k > 0; and the state.

    The denominator is an extra value column of ones: state [B, H, Dk, Dv + 1].
    """
    q = q / (positions[..., None, None] + 1)  # cancels out; keeps both sums in the range of 16-bit floats
    sums, state = scan(q, k, F.pad(v, (0, 1), value=1.0), decay, state=state, reset=begins, return_state=True)
    top, bottom = sums.split([v.shape[-1], 1], -1)
    return top / bottom.clamp_min(torch.finfo(bottom.dtype).tiny), state


class LinearAttention(Recurrent):
    """Attention with weights f(q) . f(k), f = elu + 1, as a running sum. Katharopoulos et al. 2020, arXiv:2006.16236.

    It has no positional encoding, only causal order: combine it with layers that have one, or train long enough.
    """

    paper: ClassVar[str] = "arXiv:2006.16236"
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim + 1  # and the sum of the keys

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        return qkv_and_out(self, hidden_size)

    def build(self, place: Placement) -> LinearAttentionLayer:
        return LinearAttentionLayer(self, place)


class LinearAttentionLayer(RecurrentLayer):
    """The module behind `LinearAttention`."""

    def mix(
        self, x: Tensor, context: Context, positions: Tensor, begins: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.spec.num_heads, -1)).unbind(-3)
        mixed, state = weighted_mean(F.elu(q) + 1, F.elu(k) + 1, v, positions, None, begins, known)
        return self.out(mixed.flatten(-2)), state
