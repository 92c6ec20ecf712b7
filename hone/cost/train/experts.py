"""Cost of expert parallelism in training: what of a model one rank holds, and the rows that its layers send to other ranks' experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.ranks import Transfers


@dataclass(frozen=True)
class ExpertRows:
    """`degree` ranks that each hold a part of the experts of every layer; `peers`: copy engines bring their rows.

    Tokens are taken to choose all experts alike.
    """

    degree: int = 1
    peers: bool = False

    def step_s(
        self,
        dims: ModelDims,
        tokens: int,
        dtype: str,
        times: Transfers,
        *,
        micro_batches: int,
        recomputed: Collection[int] = (),
    ) -> float:
        """Seconds of the transfers of a step of micro-batches of `tokens` each; a layer of `recomputed` runs forward twice.

        Those that shared experts are computed beside are counted, too: how much of them passes so is not known.
        """
        if self.degree == 1:
            return 0.0
        each = 0.0
        for index, layer in enumerate(dims.layers):
            rows = BYTES[dtype] * tokens * layer.routed_values / 2  # there, and back as many
            again = sum(1 for one in recomputed if one == index)
            each += (4 + 2 * again) * times.seconds("all_to_all", self.degree, rows) if rows else 0.0
        return micro_batches * each

    def sent_bytes(self, dims: ModelDims, tokens: int, width: int, *, micro_batches: int) -> float:
        """Bytes of rows of `width` bytes a number that a rank sends in a step without recomputation: forward and backward, both ways."""
        routed = sum(layer.routed_values for layer in dims.layers)
        return micro_batches * 2 * width * tokens * routed * (self.degree - 1) / self.degree

    def room_bytes(self, dims: ModelDims, tokens: int, dtype: str) -> float:
        """Bytes beside a layer's activations: its rows as they came and as they go back, and the rooms of `peers` of two calls."""
        if self.degree == 1:
            return 0.0
        rows = max((layer.routed_values for layer in dims.layers), default=0) / 2 * tokens * BYTES[dtype]
        return (2 + (2 * self.degree if self.peers else 0)) * rows


def part_of(whole: ModelDims, experts: int, degree: int) -> ModelDims:
    """The dimensions of one of `degree` ranks, of which each has as many of the `experts` weights that all experts have together."""
    less = experts - experts // degree
    return replace(whole, num_params=whole.num_params - less)
