"""Stories: prose without sense, the same for the same seed, that plain filters let pass."""

from __future__ import annotations

import random

WORDS = [
    "the",
    "be",
    "to",
    "of",
    "and",
    "that",
    "have",
    "with",
    "house",
    "river",
    "mountain",
    "letter",
    "green",
    "quickly",
    "under",
    "walked",
    "seven",
    "bright",
]


def story(seed: int, words: int = 120) -> str:
    """Sentences of twelve random WORDS."""
    draw = random.Random(seed)
    return " ".join(" ".join(draw.choices(WORDS, k=12)).capitalize() + "." for _ in range(words // 12))
