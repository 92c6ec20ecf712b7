"""Odds ratio preference optimization: the loss of the chosen answer, and a penalty on the odds of the rejected one, without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.objectives.preference.base import Answers, Preference

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")
F = lazy("torch.nn.functional")


class ORPO(Preference):
    """Cross entropy of the chosen answer - weight * log sigmoid(log odds ratio), by probabilities a token. Hong et al. 2024, arXiv:2403.07691."""

    paper: ClassVar[str] = "arXiv:2403.07691"
    weight: float = Field(0.1, ge=0, description="Weight of the odds ratio, lambda in the paper.")

    def losses(self, answers: Answers, reference: Answers | None) -> Tensor:
        odds = self.rewards(answers, reference)
        return -answers.means[:, 0] - self.weight * F.logsigmoid(odds[:, 0] - odds[:, 1])

    def rewards(self, answers: Answers, reference: Answers | None) -> Tensor:
        """Log odds log(p / (1 - p)) of p, the geometric mean of an answer's token probabilities."""
        means = answers.means.clamp(max=-1e-7)  # 1 - p is above 0
        return means - torch.log(-torch.expm1(means))
