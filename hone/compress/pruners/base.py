"""Base of the pruners: which weights of a matrix stay, from a score of each.

Shapes: N output features (rows), K input features (columns).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.compress.step import Step

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.selection import Pattern

NofM = Literal["none", "2:4", "4:8"]


class Sparse(Step):
    """A step that sets weights to zero: how many, and in which pattern."""

    sparsity: float = Field(0.5, ge=0.0, lt=1.0, description="Fraction of each matrix's weights that become zero.")
    pattern: NofM = Field(
        "none",
        description="N:M: of every M neighbouring weights of a row N stay, as a GPU's sparse products need (2:4).",
    )

    @model_validator(mode="after")
    def _half(self) -> Sparse:
        if self.pattern != "none" and self.sparsity != 0.5:
            raise ValueError(f"pattern {self.pattern} zeroes half of the weights, sparsity is {self.sparsity}")
        return self

    @property
    def prunes(self) -> bool:
        return self.sparsity > 0

    @property
    def groups(self) -> Pattern | None:
        """The pattern as two numbers."""
        from hone.ops.rounding.selection import Pattern

        return None if self.pattern == "none" else Pattern(int(self.pattern[0]), int(self.pattern[-1]))

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.pattern != "none" and columns % int(self.pattern[-1]):
            raise SpecError(
                f"{self.kind}: pattern {self.pattern} does not divide the {columns} input features of {name}",
                fix="set pattern=none, or leave this matrix out with ignore",
            )
        super().check(name, rows, columns)


class Pruner(Sparse):
    """A step that sets weights to zero and stores nothing; a subclass writes `apply`, which calls `Matrix.prune`."""

    gives: ClassVar[frozenset[str]] = frozenset({"weights:sparse"})

    def figures(self) -> dict[str, Estimate]:
        return {"sparsity": Estimate(value=self.sparsity, unit="fraction", formula="the option sparsity")}

    def largest_of(self, scores: Tensor, scope: Literal["matrix", "row"]) -> Tensor:
        """Bool [N, K]: all but the fraction `sparsity` of the smallest `scores` of a row or of the matrix, or of its neighbours
        where there is a pattern."""
        from hone.ops.rounding.selection import largest

        if self.groups is not None:
            stay, group = self.groups
            return largest(scores.reshape(-1, group), group - stay).view(scores.shape)
        together = scores if scope == "row" else scores.view(1, -1)
        return largest(together, round(self.sparsity * together.shape[1])).view(scores.shape)
