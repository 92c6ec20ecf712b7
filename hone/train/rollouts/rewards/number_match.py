"""Reward of an answer with the right number, as for arithmetic: the last number of the text is the result."""

from __future__ import annotations

import re
from decimal import Decimal

from pydantic import Field

from hone.train.rollouts.rewards.base import Reward

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


class NumberMatch(Reward):
    """1 where the completion's last number equals the reference answer's last number, else 0. 1,000 and 1000.0 are the same number."""

    marker: str = Field(
        "", description="Text after whose last place the number is looked for; a completion without it gets 0."
    )
    tolerance: float = Field(0.0, ge=0, description="Largest difference, relative to the reference's number.")

    def score(self, prompt: str, completion: str, answer: str) -> float:
        if self.marker and self.marker not in completion:
            return 0.0
        found, wanted = (
            last_number(text.rpartition(self.marker)[2] if self.marker else text) for text in (completion, answer)
        )
        if found is None or wanted is None:
            return 0.0
        return float(abs(found - wanted) <= Decimal(self.tolerance) * abs(wanted))


def last_number(text: str) -> Decimal | None:
    """The last number in `text`; None where there is none. A minus after a letter or a digit is one of subtraction."""
    found = None
    for one in _NUMBER.finditer(text):
        said = one[0].replace(",", "")
        if said[0] in "+-" and one.start() and (text[one.start() - 1].isalnum() or text[one.start() - 1] == ")"):
            said = said[1:]
        found = Decimal(said)
    return found
