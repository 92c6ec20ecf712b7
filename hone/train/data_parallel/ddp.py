"""DDP: every rank holds all weights and all optimizer state; gradients are summed layer by layer during the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.train.data_parallel.base import DataParallel

if TYPE_CHECKING:
    from hone.train.data_parallel.sums import Sum


class DDP(DataParallel):
    """Whole copies; sums of each layer's gradient overlap the backward pass of the layers before it. Li et al. 2020, arXiv:2006.15704."""

    paper: ClassVar[str] = "arXiv:2006.15704"

    all_reduce: Literal["backend", "ring", "halving", "doubling", "tree"] = Field(
        "backend",
        description="Algorithm of the sums: that of NCCL or gloo, beside the backward pass, or a readable one, which waits.",
    )

    def summing(self) -> Sum | None:
        """The algorithm asked for."""
        from hone.train.data_parallel.sums import Algorithm

        return None if self.all_reduce == "backend" else Algorithm(self.all_reduce)
