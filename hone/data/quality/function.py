"""A scorer that calls a Python function, so that any model of the user can add a column."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.quality.base import Scorer
from hone.text.batch import Texts


class Function(Scorer):
    """Scores by a function of the user, which takes a list of texts and returns a number for each."""

    target: str = Field("", description="The function as module:name, importable where the stage runs.")
    batch: int = Field(256, ge=1, description="Most texts in one call.")

    def train(self, folder: Path) -> dict[str, float]:
        """Only checks that the function can be found."""
        self.open(folder)
        return {}

    def open(self, folder: Path) -> _Opened:
        """The function. Raises SpecError when it cannot be found."""
        module, _, name = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SpecError(
                f"scorer.target = '{self.target}' cannot be found: {error}",
                fix="write module:name of a function on the path",
            ) from None
        return _Opened(self, found)


class _Opened(NamedTuple):
    spec: Function
    call: Callable[[list[str]], Sequence[float]]

    def __repr__(self) -> str:
        return repr(self.spec)

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        """{column: float32 [n]}. Raises SpecError when the function returns another number of scores, or no numbers."""
        strings = list(texts.strings())
        found = [np.empty(0, np.float32)]
        for first in range(0, len(strings), self.spec.batch):
            part = strings[first : first + self.spec.batch]
            try:
                scores = np.asarray(self.call(part), np.float32)
            except (TypeError, ValueError) as error:
                raise SpecError(
                    f"{self.spec.target} returned no numbers: {error}", fix="return a float for each text of the list"
                ) from None
            if scores.shape != (len(part),):
                raise SpecError(
                    f"{self.spec.target} returned shape {scores.shape} for {len(part)} texts",
                    fix="return a float for each text of the list",
                )
            found.append(scores)
        return {self.spec.column: np.concatenate(found)}
