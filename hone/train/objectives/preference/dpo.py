"""Direct preference optimization: a classifier of pairs whose logit is how much the model prefers the chosen answer beyond its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.lazy import lazy
from hone.train.objectives.preference.base import Answers, Preference

if TYPE_CHECKING:
    from torch import Tensor

    from hone.train.objectives.base import Setting
    from hone.train.passes import Preparer

cached = lazy("hone.train.objectives.preference.cached")
F = lazy("torch.nn.functional")


class DPO(Preference):
    """-log sigmoid(beta (log-ratio of chosen - of rejected)), ratios to the frozen teacher. Rafailov et al. 2023, arXiv:2305.18290."""

    paper: ClassVar[str] = "arXiv:2305.18290"
    from_teacher: ClassVar[bool] = True
    beta: float = Field(0.1, gt=0, description="How strongly the model is held to its reference.")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid",
        description="sigmoid; hinge (arXiv:2305.10425); ipo: squared distance of the log-ratios a token to 1 / (2 beta) (arXiv:2310.12036).",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="With sigmoid, the share of pairs whose labels may be wrong."
    )

    precompute_ref_log_probs: bool = Field(
        False,
        description="Compute the reference's log-probabilities of a sequence once, when it is first read, and keep them.",
    )

    @property
    def reads_teacher(self) -> bool:
        return not self.precompute_ref_log_probs

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self.precompute_ref_log_probs

    def preparer(self, setting: Setting | None) -> Preparer | None:
        """The cache of the reference's log-probabilities, if there is to be one."""
        return cached.ReferenceCache() if self.precompute_ref_log_probs else None

    @model_validator(mode="after")
    def _smooths_a_sigmoid(self) -> DPO:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing is of loss sigmoid: {self.loss} has none")
        return self

    def losses(self, answers: Answers, reference: Answers | None) -> Tensor:
        assert reference is not None, "dpo without its reference"
        if self.loss == "ipo":
            ratio = answers.means - reference.means
            return (ratio[:, 0] - ratio[:, 1] - 1 / (2 * self.beta)) ** 2
        rewards = self.rewards(answers, reference)
        logits = rewards[:, 0] - rewards[:, 1]
        if self.loss == "hinge":
            return (1 - logits).relu()
        return -(1 - self.label_smoothing) * F.logsigmoid(logits) - self.label_smoothing * F.logsigmoid(-logits)

    def rewards(self, answers: Answers, reference: Answers | None) -> Tensor:
        assert reference is not None, "dpo without its reference"
        return self.beta * (answers.log_probs - reference.log_probs)
