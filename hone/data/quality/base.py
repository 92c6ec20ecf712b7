"""What a scorer is: a model that reads texts and adds a column, for filters to decide by."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import Field, field_validator

from hone.base.table import Technique
from hone.data.text.batch import Texts


class Opened(Protocol):
    """A scorer with its model in memory: columns of a batch, of the same names and types for any batch, an empty one too."""

    def columns(self, texts: Texts) -> dict[str, np.ndarray]: ...


class Scorer(Technique):
    """A column per document, 0 to 1, high where the text is like the good examples. Train once, then open anywhere."""

    column: str = Field("quality", description="Name of the column, for expressions such as quality >= 0.5.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that it adds."""
        return (self.column,)

    @field_validator("column")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value.isidentifier() or keyword.iskeyword(value):
            raise ValueError("a column's name is letters, digits and underscores, and no word of Python")
        return value

    def train(self, folder: Path) -> dict[str, float]:
        """Makes the model's files in `folder`, unless they are there, and returns what is known of its quality."""
        raise NotImplementedError

    def open(self, folder: Path) -> Opened:
        """The scorer as trained in `folder`. Raises ArtifactError when it is not there or damaged."""
        raise NotImplementedError


def area_under_curve(targets: np.ndarray, scores: np.ndarray) -> float:
    """Chance that a random good text (`targets` True) scores above a random bad one, ties counting half."""
    from scipy.stats import rankdata  # takes half a second to load

    ranks, good = rankdata(scores), int(targets.sum())
    return float((ranks[targets].sum() - good * (good + 1) / 2) / (good * (len(targets) - good)))
