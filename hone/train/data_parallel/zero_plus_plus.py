"""ZeRO++: zero3 whose weights and gradients travel in few bits, and for the backward pass between neighbours only."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hone.cost.train.replicas import Divided
from hone.train.data_parallel.base import Lossy
from hone.train.data_parallel.moves import RESHARD, Moves, ReshardAfterForward, within


class ZeroPlusPlus(Lossy):
    """As zero3, but a layer's weights are gathered in 8 bits (qwZ) and gradients are summed in 4 or 8 (qgZ). Wang et al. 2023, arXiv:2306.10209."""

    paper: ClassVar[str] = "arXiv:2306.10209"
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer", "gradients", "weights"})

    zero_quantized_weights: bool = Field(
        True,
        description="Gather layers' weights as 8-bit integers in blocks of 256; passes compute with the rounded ones.",
    )
    zero_quantized_gradients: bool = Field(
        True, description="Sum gradients by all-to-alls of integers in blocks of 256; false: in float32."
    )
    gradient_bits: Literal[4, 8] = Field(4, description="Bits of a gradient that travels.")
    reshard_after_forward: ReshardAfterForward = Field("default", description=RESHARD)

    def replicas(self, num_ranks: int) -> int:
        """One group."""
        return 1

    def moves(self, num_shards: int) -> Moves:
        """As `DataParallel.moves`; gradients go to neighbours first where `reshard_after_forward` names their number."""
        bits = self.gradient_bits if self.zero_quantized_gradients else 0
        return Moves(within(self.reshard_after_forward, num_shards), 8 if self.zero_quantized_weights else 0, bits)

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`."""
        moves = self.moves(num_ranks)
        bits = {"weight_bits": moves.weight_bits, "gradient_bits": moves.gradient_bits}
        return replace(super().divided(num_ranks), within=moves.within, **bits)
