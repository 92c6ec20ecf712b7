"""Cross-layer sharing of keys and values: a layer has queries only and attends to an earlier layer's keys and values."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from hone.cost.dims import mean_positions
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, NormSpec, Parameter, Piece, projection_in, projection_out
from hone.model.mixer import Mixer
from hone.model.rope import Rope
from hone.ops import rope


class SharedKV(Mixer):
    """Attention to the keys and values of the nearest layer before it that has its own. Brandon et al. 2024, arXiv:2405.12981.

    `mixers: [attention, shared_kv]` keeps half the keys, `[attention, shared_kv, shared_kv]` a third. The source layer
    may be `attention` or `sliding_window`; rope, window, head_dim and qk_norm must be equal to the source layer's.
    """

    paper: ClassVar[str] = "arXiv:2405.12981"
    complexity: ClassVar[str] = "O(S^2)"
    reuses_kv: ClassVar[bool] = True
    splits: ClassVar[tuple[str, ...]] = ("num_heads",)
    reads_once: ClassVar[bool] = True

    num_heads: int = Field(gt=0, description="Query heads.")
    head_dim: int = Field(gt=0, description="Width of a head.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions of the layer whose keys are used.")
    window: int | None = Field(None, gt=0, description="Sliding window of the layer whose keys are used.")
    qk_norm: bool = Field(False, description="RMS norm of each query head before the rotation.")

    @model_validator(mode="after")
    def _pairs(self) -> SharedKV:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels")
        return self

    def check_source(self, source: Mixer) -> None:
        for name in ("head_dim", "rope", "window", "qk_norm"):
            mine, theirs = getattr(self, name), getattr(source, name)
            if mine != theirs:
                raise ValueError(f"shared_kv.{name} is {mine}, but the layer whose keys it uses has {theirs}")
        for name in ("rotary_dim", "scale", "softcap"):
            if getattr(source, name) is not None:
                raise ValueError(
                    f"shared_kv has no {name}, but the layer whose keys it uses has {getattr(source, name)}"
                )
        if source.sinks:
            raise ValueError("shared_kv has no sinks, but the layer whose keys it uses has them")
        if source.qk_norm_over != "head":
            raise ValueError(
                f"shared_kv norms heads, the layer whose keys it uses has qk_norm_over {source.qk_norm_over!r}"
            )
        if self.num_heads % source.num_kv_heads:
            raise ValueError(
                f"shared_kv.num_heads {self.num_heads} is no multiple of the {source.num_kv_heads} key heads it uses"
            )

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        queries = Piece("q", self.num_heads * self.head_dim, self.num_heads)
        return (
            projection_in("q", hidden_size, queries),
            projection_out(hidden_size, self.num_heads, self.head_dim, reads=Computed("mixer.mixed")),
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        return (NormSpec("q_norm", self.head_dim),) if self.qk_norm else ()

    def mixing_flops(self, seq_len: int) -> float:
        return 4.0 * self.num_heads * self.head_dim * mean_positions(seq_len, self.window)

    def state_values(self, seq_len: int) -> float:
        """0: it keeps no keys of its own."""
        return 0.0

    def prepare(self, context: Context, x: Tensor) -> None:
        super().prepare(context, x)
        context.expect(x, self.head_dim, self.window)

    def build(self, place: Placement) -> SharedKVLayer:
        return SharedKVLayer(self, place)


class SharedKVLayer(Block):
    """The module behind `SharedKV`. `forward(x [..., D], context) -> [..., D]`."""

    def __init__(self, spec: SharedKV, place: Placement) -> None:
        super().__init__(spec, place)
        self.source = -1  # set by the decoder: the layer whose keys it attends to
        self.scale = spec.head_dim**-0.5

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        q = self.q(x).unflatten(-1, (spec.num_heads, spec.head_dim))
        q = self.q_norm(q) if spec.qk_norm else q
        q = rope(q, *context.rotary(spec.rope, spec.head_dim, x.dtype))
        return self.out(context.attend(self.source, q, None, None, scale=self.scale, window=spec.window).flatten(-2))
