"""Reward of an answer of a given form, such as one with its thoughts between tags."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from hone.train.rollouts.rewards.base import Reward


class Pattern(Reward):
    """1 where the whole completion matches a regular expression, else 0."""

    regex: str = Field(
        r"(?s)<think>.*</think>.*<answer>.*</answer>\s*",
        description="Regular expression of Python that the whole completion must match.",
    )

    @field_validator("regex")
    @classmethod
    def _compiles(cls, regex: str) -> str:
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"'{regex}' is no regular expression: {error}") from None
        return regex

    def score(self, prompt: str, completion: str, answer: str) -> float:
        return float(re.fullmatch(self.regex, completion) is not None)
