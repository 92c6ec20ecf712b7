"""The base of scorers, models that read texts and add a column for filters."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import Field, field_validator

from hone.base.table import Technique
from hone.text.batch import Texts


class Opened(Protocol):
    """A scorer with its model in memory; it adds columns to a batch, of the same names and types for any batch, also an empty one."""

    def columns(self, texts: Texts) -> dict[str, np.ndarray]: ...


class Scorer(Technique):
    """Adds a column from 0 to 1, high where the text is like the good examples. Trained once, then opened in any worker."""

    column: str = Field("quality", description="Name of the column, for expressions such as quality >= 0.5.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that it adds."""
        return (self.column,)

    @field_validator("column")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value.isidentifier() or keyword.iskeyword(value):
            raise ValueError("a column's name must be letters, digits and underscores, and not a keyword of Python")
        return value

    def train(self, folder: Path) -> dict[str, float]:
        """Trains the model into files in `folder`, unless they exist, and returns measures of its quality."""
        raise NotImplementedError

    def open(self, folder: Path) -> Opened:
        """The scorer as trained in `folder`. Raises ArtifactError when it is missing or damaged."""
        raise NotImplementedError


def area_under_curve(targets: np.ndarray, scores: np.ndarray) -> float:
    """Probability that a random good text (`targets` True) scores above a random bad one, ties counting half."""
    from scipy.stats import rankdata  # takes half a second to import

    ranks, good = rankdata(scores), int(targets.sum())
    return float((ranks[targets].sum() - good * (good + 1) / 2) / (good * (len(targets) - good)))
