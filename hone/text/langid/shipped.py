"""The package's language model: its file and the languages that it knows, read without a compiler."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

SHIPPED = Path(__file__).with_name("languages.bin")
"""The model's file; NOTICE beside it names its training data."""

UNKNOWN = "unknown"
"""Value of the language column when no language is identified; its score is 0."""
MACROLANGUAGES = {
    "id": "msa", "ms": "msa", "bs": "hbs", "hr": "hbs", "sr": "hbs", "nb": "nor", "nn": "nor",
}  # fmt: skip
"""ISO 639-3 codes of the macrolanguages of languages that short texts hardly tell apart."""


@functools.cache
def shipped_languages() -> tuple[str, ...]:
    """The codes of the model's languages, sorted, read from the first line of its file."""
    with open(SHIPPED, "rb") as file:
        return tuple(sorted(code for script in json.loads(file.readline())["scripts"] for code in script["languages"]))


def answers(languages: Sequence[str]) -> tuple[str, ...]:
    """The codes that `languages` have where macrolanguages are not split, sorted."""
    return tuple(sorted({MACROLANGUAGES.get(code, code) for code in languages}))
