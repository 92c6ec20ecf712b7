"""The generalized Jensen-Shannon divergence between teacher and student."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.train.objectives.divergences.base import Divergence


class JSD(Divergence):
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. Agarwal et al. 2023 (GKD), arXiv:2306.13649."""

    paper: ClassVar[str] = "arXiv:2306.13649"
    beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the teacher in the mixture m; divided by beta or 1 - beta it goes to forward_kl at 0, reverse_kl at 1.",
    )

    @property
    def weight(self) -> float:
        return self.beta
