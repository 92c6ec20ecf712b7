"""Simple preference optimization: the log-probability a token as reward, with a margin that the chosen answer must win by."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.objectives.preference.base import Answers, Preference

if TYPE_CHECKING:
    from torch import Tensor

F = lazy("torch.nn.functional")


class SimPO(Preference):
    """-log sigmoid(beta (mean log-probability of chosen - of rejected) - margin), without a reference. Meng et al. 2024, arXiv:2405.14734."""

    paper: ClassVar[str] = "arXiv:2405.14734"
    beta: float = Field(2.0, gt=0, description="Factor of the log-probability a token.")
    margin: float = Field(
        0.5, ge=0, description="What the chosen answer's reward must be above the other's, gamma in the paper."
    )

    def losses(self, answers: Answers, reference: Answers | None) -> Tensor:
        rewards = self.rewards(answers, reference)
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.margin)

    def rewards(self, answers: Answers, reference: Answers | None) -> Tensor:
        return self.beta * answers.means
