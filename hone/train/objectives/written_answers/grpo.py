"""Group relative policy optimization: the model writes several answers to a prompt, and the better ones of a group become more likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.feed.load import IGNORE
from hone.train.objectives.preference.base import token_log_probs
from hone.train.objectives.written_answers.base import Written

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder

torch = lazy("torch")
np = lazy("numpy")
groups = lazy("hone.train.rollouts.groups")


class GRPO(Written):
    """-min(r A, clip(r) A) + beta KL of each token of an answer, A its reward against its group's. Shao et al. 2024, arXiv:2402.03300."""

    paper: ClassVar[str] = "arXiv:2402.03300"
    reference_at_start: ClassVar[bool] = True
    unit: ClassVar[str] = "loss/token"
    beta: float = Field(
        0.0, ge=0, description="Weight of the KL divergence from the reference; above 0 there must be one: a teacher."
    )
    epsilon: float = Field(
        0.2, gt=0, lt=1, description="Ratios of new to old probabilities below 1 - epsilon are clipped."
    )
    epsilon_high: float | None = Field(
        None, gt=0, description="Those above 1 + epsilon_high; empty: epsilon (DAPO, arXiv:2503.14476: 0.28)."
    )
    num_iterations: int = Field(
        1,
        gt=0,
        description="Optimizer steps on the same answers; in the first one all ratios are 1, so that nothing is clipped.",
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field(
        "dapo",
        description="What the sum of the tokens' losses is divided by: grpo: each answer's length, then the number of answers; dapo: all "
        "tokens (arXiv:2503.14476); dr_grpo: the answers times max_completion_length (arXiv:2503.20783).",
    )
    scale_rewards: Literal["group", "none"] = Field(
        "group", description="Whether advantages are divided by the deviation of their group's rewards; none: Dr. GRPO."
    )

    @property
    def from_teacher(self) -> bool:  # type: ignore[override]
        """Whether it requires a reference."""
        return self.beta > 0

    @property
    def reads_teacher(self) -> bool:
        """False: the reference's log-probabilities are values of the written batch."""
        return False

    def chosen(self, rewards: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """All answers, each as much better as its reward is above its group's mean."""
        return groups.advantages_of(rewards, self.scale_rewards), np.ones(rewards.shape, bool)

    def count_in(self, batch: Batch) -> int:
        """The divisor of the sum, by `loss_type`."""
        if self.loss_type == "dapo":
            return self.count(batch.targets)
        answers = round(float(batch.values[..., groups.SHARE].sum(dtype=np.float64)))  # type: ignore[attr-defined]
        return answers * (self.max_completion_length if self.loss_type == "dr_grpo" else 1)

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """The tokens' losses summed; float32 scalar. Shapes as in `Objective.total`; `context.values` [B, S, 4] are those of Rollouts."""
        assert context.values is not None, "grpo is trained on answers that it wrote"
        valid = targets != IGNORE
        values: Any = context.values[valid]
        found = token_log_probs(model, x[valid], targets[valid], self.temperature)
        old = found.detach() if self.num_iterations == 1 else values[:, groups.OLD]
        advantage, ratio = values[:, groups.ADVANTAGE], torch.exp(found - old)
        clipped = ratio.clamp(1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high))
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        if self.beta:
            apart = values[:, groups.REFERENCE] - found
            losses = losses + self.beta * (torch.exp(apart) - apart - 1)
        return (losses * values[:, groups.SHARE] if self.loss_type == "grpo" else losses).sum()
