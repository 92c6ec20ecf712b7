"""Reward of an answer that is the reference answer, or ends with it after a marker."""

from __future__ import annotations

from pydantic import Field

from hone.train.rollouts.rewards.base import Reward


class ExactMatch(Reward):
    """1 where the completion is the reference answer, else 0; blanks around both do not count."""

    marker: str = Field(
        "",
        description="Text after whose last place both answers begin, such as '####'; a completion without it gets 0.",
    )
    ignore_case: bool = Field(False, description="Whether upper and lower case are the same.")

    def score(self, prompt: str, completion: str, answer: str) -> float:
        if self.marker and self.marker not in completion:
            return 0.0
        texts = [text.rpartition(self.marker)[2] if self.marker else text for text in (completion, answer)]
        one, other = (text.strip().casefold() if self.ignore_case else text.strip() for text in texts)
        return float(one == other)
