"""The base of objectives on answers that the model writes to the prompts of the data: how they are written, and what they are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.base.table import Choice, Technique
from hone.train.objectives.base import Objective
from hone.train.rollouts import REWARDS
from hone.train.rollouts.rewards.exact_match import ExactMatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hone.train.objectives.base import Setting
    from hone.train.passes import Preparer

groups = lazy("hone.train.rollouts.groups")
tokenizers = lazy("hone.model.tokenizer")


class Written(Objective):
    """A loss over groups of answers that the model writes to each prompt of a step."""

    prepares: ClassVar[bool] = True
    writes: ClassVar[bool] = True
    rewards: tuple[Annotated[Technique, Choice(REWARDS)], ...] = Field(
        (ExactMatch(kind="exact_match"),),
        min_length=1,
        description="What an answer is worth: the sum of these, each times its weight.",
    )
    num_generations: int = Field(8, gt=1, description="Answers written to each prompt: a group.")
    max_completion_length: int = Field(256, gt=0, description="Most tokens of an answer.")
    temperature: float = Field(
        1.0, gt=0, le=100, description="Temperature of the answers, and of all their log-probabilities."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Sample among the fewest tokens whose probability reaches this.")
    mask_truncated_completions: bool = Field(
        False, description="Answers that max_completion_length cuts off have no loss (DAPO's overlong filtering)."
    )
    max_num_seqs: int = Field(128, gt=0, description="Most answers that are written at once.")

    def chosen(self, rewards: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(the advantage of each answer, whether it is trained on bool) of groups of `rewards`, all [P, G]."""
        raise NotImplementedError

    def preparer(self, setting: Setting | None) -> Preparer | None:
        """What writes the answers; None without a tokenizer's folder."""
        if setting is None:
            return None
        return groups.Rollouts(self, tokenizers.load_tokenizer(setting.tokenizer), setting.seed)  # type: ignore[no-any-return]
