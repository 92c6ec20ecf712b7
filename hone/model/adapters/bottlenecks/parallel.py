"""Parallel adapters: a bottleneck beside the feed-forward of every layer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from hone.model.adapters.bottlenecks.base import Bottleneck
from hone.model.adapters.initial import uniform


class Parallel(Bottleneck):
    """y + s U f(D x) of the feed-forward's output y and the stream x before it; U is zero at first. He et al. 2021, arXiv:2110.04366."""

    paper: ClassVar[str] = "arXiv:2110.04366"
    reads: ClassVar[Literal["output", "sum", "stream"]] = "stream"
    first_up: ClassVar[float] = 0.0

    reduction_factor: float = Field(2.0, ge=1, description="The model's width over that of the bottleneck.")
    scaling: float = Field(4.0, gt=0, description="What the second linear's output is multiplied with.")

    def first_down(self, inputs: int) -> Any:
        """As torch draws linears."""
        return uniform(inputs)
