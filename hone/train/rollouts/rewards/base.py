"""The base of rewards: a number for each answer, from the texts of prompt, answer and reference answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from hone.base.table import Technique


class Reward(Technique):
    """A function of texts alone, so that it can be verified. Rewards of an objective are added, each times its weight."""

    weight: float = Field(1.0, description="Factor of this reward in the sum of all.")

    def check(self) -> None:
        """Raises SpecError where it cannot be computed, such as a function that cannot be imported."""

    reads_tokens: ClassVar[bool] = False
    """Whether it reads token ids (`token_scores`) in place of texts."""

    def check_tokenizer(self, tokenizer: str | None, where: str) -> None:
        """Raises SpecError where it cannot read tokens of the data at `where`, whose tokenizer has the identity `tokenizer`."""

    def token_scores(self, rows: Sequence[Sequence[int]], device: Any) -> list[float]:
        """The reward of each row of token ids, a prompt and its answer with the token that ended it, computed on `device`."""
        raise NotImplementedError

    def scores(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """The reward of each completion, without the weight: `prompts` before them, and the reference `answers` of the data.

        Texts have no special tokens.
        """
        return [self.score(*row) for row in zip(prompts, completions, answers, strict=True)]

    def score(self, prompt: str, completion: str, answer: str) -> float:
        """The reward of one completion."""
        raise NotImplementedError
