"""Best-of-n rejection sampling: of the answers that the model writes to a prompt the best one is its training text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.feed.load import IGNORE
from hone.train.objectives.preference.base import token_log_probs
from hone.train.objectives.written_answers.base import Written

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hone.model.decoder import Decoder

np = lazy("numpy")


class BestOfN(Written):
    """Cross entropy of the answer with the highest reward of num_generations that the model writes (rejection sampling). Dong et al. 2023 (RAFT), arXiv:2304.06767."""

    paper: ClassVar[str] = "arXiv:2304.06767"
    beta: ClassVar[float] = 0.0
    num_iterations: ClassVar[int] = 1
    unit: ClassVar[str] = "nats/token"
    temperature: float = Field(
        1.0, gt=0, le=100, description="Temperature at which answers are drawn; the loss has none."
    )
    min_reward: float | None = Field(
        None,
        description="Prompts whose best answer is worth less are left out, such as 1 with a reward that verifies; empty: none is.",
    )

    def chosen(self, rewards: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Of each group the first of the best answers, if it is good enough."""
        kept = np.zeros(rewards.shape, bool)
        kept[np.arange(len(rewards)), rewards.argmax(1)] = True
        if self.min_reward is not None:
            kept &= rewards >= self.min_reward
        return kept.astype(np.float64), kept

    def total(
        self, model: Decoder, x: Tensor, targets: Tensor, teacher: Decoder | None, teacher_hidden: Tensor | None
    ) -> Tensor:
        """Nats summed over the tokens of the answers that were kept."""
        valid = targets != IGNORE
        return -token_log_probs(model, x[valid], targets[valid]).sum()
