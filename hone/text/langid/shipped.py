"""The package's language model: its file and the languages that it knows, read without a compiler."""

from __future__ import annotations

import functools
import json
from pathlib import Path

SHIPPED = Path(__file__).with_name("languages.bin")
"""The model's file; NOTICE beside it names its training data."""


@functools.cache
def shipped_languages() -> tuple[str, ...]:
    """The codes of the model's languages, sorted, read from the first line of its file."""
    with open(SHIPPED, "rb") as file:
        return tuple(sorted(code for script in json.loads(file.readline())["scripts"] for code in script["languages"]))
