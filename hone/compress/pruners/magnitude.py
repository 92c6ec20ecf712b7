"""Magnitude pruning: the smallest weights of every matrix, of every row or of the whole model become zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.lazy import lazy
from hone.base.spec import Quiet
from hone.compress.matrix import Matrix
from hone.compress.pruners.base import Pruner
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")
selection = lazy("hone.ops.rounding.selection")

HISTOGRAM_BYTES = 190.0
"""Bytes a weight, at the rate of a large copy, to read the checkpoint twice and count magnitudes: 12 ns (two Intel Xeon cores)."""


class Magnitude(Pruner):
    """Zeroes the given fraction of weights, smallest magnitude first. Han et al. 2015, arXiv:1506.02626."""

    paper: ClassVar[str] = "arXiv:1506.02626"

    scope: Annotated[Literal["matrix", "row", "global"], Quiet()] = Field(
        "matrix", description="Weights that share one threshold: a matrix, a row of it, or all matrices of the model."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Magnitude:
        if self.pattern != "none" and self.scope != "matrix":
            raise ValueError(
                f"pattern {self.pattern} compares neighbours alone, so scope={self.scope} would do nothing"
            )
        return self

    @property
    def reads_model(self) -> bool:
        return self.scope == "global"

    def prepare(self, weights: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
        """`threshold`: the largest magnitude that goes; `tied`: the share that goes of the weights of that magnitude.

        Exact: the bits of a positive float32 order like its value, so two counts of 16 bits each find it.
        """
        upper = _count((bits >> 16 for bits in map(_bits, weights())), 1 << 15)
        gone = round(self.sparsity * int(upper.sum()))
        if not gone:
            return {"threshold": 0.0, "tied": 0.0}
        first, gone = _reach(upper, gone)
        lower = _count((bits[bits >> 16 == first] & 0xFFFF for bits in map(_bits, weights())), 1 << 16)
        last, gone = _reach(lower, gone)
        threshold = torch.tensor(first << 16 | last, dtype=torch.int32).view(torch.float32)
        return {"threshold": float(threshold), "tied": gone / int(lower[last])}

    def apply(self, matrix: Matrix) -> None:
        sizes = matrix.weight.abs()
        if self.pattern != "none":
            keep = self.pattern_of(sizes)
        elif self.scope == "row":
            keep = selection.largest(sizes, round(self.sparsity * sizes.shape[1]))
        elif self.scope == "matrix":
            keep = selection.largest(sizes.view(1, -1), round(self.sparsity * sizes.numel())).view(sizes.shape)
        else:
            sizes = sizes.float()
            tied = sizes == matrix.model["threshold"]
            gone = round(matrix.model["tied"] * int(tied.sum()))
            stays = tied.flatten().cumsum(0, dtype=torch.int32).view(sizes.shape) > gone
            keep = (sizes > matrix.model["threshold"]) | (tied & stays)
        matrix.prune(keep)

    def work(self, rows: int, columns: int) -> Work:
        """A selection and the mask, mostly the reading and writing of newly allocated memory."""
        found = Work(num_bytes=440.0 * rows * columns, num_ops=30, temporaries=12)
        if self.reads_model:
            return replace(found, num_bytes=found.num_bytes + HISTOGRAM_BYTES * rows * columns)
        return found


def _bits(weight: Tensor) -> Tensor:
    """The bits of the magnitudes of `weight` in float32, flat int32."""
    return weight.to(torch.float32).abs().view(torch.int32).flatten()


def _count(values: Iterator[Tensor], length: int) -> Tensor:
    """How often each of 0 .. length - 1 occurs, int64 [length] on the CPU."""
    total = torch.zeros(length, dtype=torch.int64)
    for one in values:
        total += torch.bincount(one, minlength=length).cpu()
    return total


def _reach(counts: Tensor, wanted: int) -> tuple[int, int]:
    """The value at which `counts`, summed in order, reach `wanted`, and how many of that value are wanted."""
    sums = counts.cumsum(0)
    place = int(torch.searchsorted(sums, wanted))
    return place, wanted - int(sums[place] - counts[place])
