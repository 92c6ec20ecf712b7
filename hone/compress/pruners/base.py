"""Base of the pruners: which weights of a matrix stay, from a score of each.

Shapes: N output features (rows), K input features (columns).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.compress.matrix import Step

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")


class Pruner(Step):
    """A step that sets weights to zero; a subclass writes `apply`, which calls `Matrix.prune`."""

    gives: ClassVar[frozenset[str]] = frozenset({"weights:sparse"})

    sparsity: float = Field(0.5, ge=0.0, lt=1.0, description="Fraction of each matrix's weights that become zero.")
    pattern: Literal["none", "2:4", "4:8"] = Field(
        "none",
        description="N:M: of every M neighbouring weights of a row N stay, as a GPU's sparse products need (2:4).",
    )

    @model_validator(mode="after")
    def _half(self) -> Pruner:
        if self.pattern != "none" and self.sparsity != 0.5:
            raise ValueError(f"pattern {self.pattern} zeroes half of the weights, sparsity is {self.sparsity}")
        return self

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.pattern != "none" and columns % int(self.pattern[-1]):
            raise SpecError(
                f"{self.kind}: pattern {self.pattern} does not divide the {columns} input features of {name}",
                fix="set pattern=none, or leave this matrix out with ignore",
            )

    def figures(self) -> dict[str, Estimate]:
        return {"sparsity": Estimate(value=self.sparsity, unit="fraction", formula="the option sparsity")}

    def pattern_of(self, scores: Tensor) -> Tensor:
        """Bool [N, K]: the N largest scores of every M neighbours."""
        most = int(self.pattern[-1])
        return keep_largest(scores.reshape(-1, most), most - int(self.pattern[0])).view(scores.shape)


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """Bool [N, K], False for the `count` smallest scores of each row; of equal scores the first are False, on any machine."""
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    return keep.scatter_(1, scores.argsort(dim=1, stable=True)[:, :count], False) if count else keep
