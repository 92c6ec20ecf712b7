"""DDP with compressed gradients: fewer bytes travel, and the sum is not exact."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.cost.train.replicas import Divided
from hone.train.data_parallel.base import Lossy

if TYPE_CHECKING:
    from hone.train.data_parallel.sums import Sum


class Bf16Gradients(Lossy):
    """As ddp, but gradients travel and are summed in bfloat16: half the bytes. Micikevicius et al. 2017, arXiv:1710.03740, section 3; Kalamkar et al. 2019, arXiv:1905.12322."""

    paper: ClassVar[str] = "arXiv:1905.12322"

    def summing(self) -> Sum:
        """Rounded sums."""
        from hone.train.data_parallel.sums import Rounded

        return Rounded()

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`."""
        return replace(super().divided(num_ranks), sent=0.5)


class PowerSGD(Lossy):
    """As ddp, but of each matrix's gradient two thin factors travel; the error is added to the next gradient. Vogels et al. 2019, arXiv:1905.13727."""

    paper: ClassVar[str] = "arXiv:1905.13727"

    rank: int = Field(4, ge=1, description="Columns of the factors; a matrix [N, M] sends rank x (N + M) numbers.")

    def summing(self) -> Sum:
        """Sums of factors."""
        from hone.train.data_parallel.sums import LowRank

        return LowRank(self.rank)

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`: each rank keeps a float32 error of every weight."""
        return replace(super().divided(num_ranks), low_rank=self.rank, kept_bytes=4.0)
