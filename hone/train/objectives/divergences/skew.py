"""Skewed Kullback-Leibler divergences: the second distribution is mixed with some of the first, so that no ratio is large."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.train.objectives.divergences.base import Divergence


class SkewKL(Divergence):
    """KL(p || skew p + (1 - skew) q). Ko et al. 2024 (DistiLLM), arXiv:2402.03898."""

    paper: ClassVar[str] = "arXiv:2402.03898"
    skew: float = Field(0.1, gt=0, lt=1, description="Share of the teacher in what it is compared with.")

    @property
    def weight(self) -> float:
        return self.skew


class SkewReverseKL(Divergence):
    """KL(q || skew q + (1 - skew) p). Ko et al. 2024 (DistiLLM), arXiv:2402.03898."""

    paper: ClassVar[str] = "arXiv:2402.03898"
    skew: float = Field(0.1, gt=0, lt=1, description="Share of the student in what it is compared with.")

    @property
    def weight(self) -> float:
        return self.skew
