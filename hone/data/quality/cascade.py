"""Cascade: a cheap scorer decides clear cases, an expensive one only uncertain cases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from hone.base.table import Choice, Table, Technique
from hone.data.quality.base import Opened, Scorer
from hone.text.batch import Texts

_PART = Choice(
    Table(  # all scorers except this one
        "scorer",
        {
            "hashed_logistic": "hone.data.quality.hashed_logistic:HashedLogistic",
            "neural": "hone.data.quality.neural:Neural",
            "function": "hone.data.quality.function:Function",
        },
    )
)


class Cascade(Scorer):
    """Two scorers: the expensive one reads only texts whose cheap score is uncertain. Viola & Jones 2001."""

    paper: ClassVar[str] = "10.1109/CVPR.2001.990517"

    cheap: Annotated[Technique, _PART] = Field(
        "hashed_logistic",  # type: ignore[arg-type]
        validate_default=True,
        description="The scorer that reads every text.",
    )
    dear: Annotated[Technique, _PART] = Field(
        "neural",  # type: ignore[arg-type]
        validate_default=True,
        description="The scorer that reads only texts whose cheap score is uncertain.",
    )
    surely_low: float = Field(0.1, ge=0, le=1, description="Below it the cheap score is used.")
    surely_high: float = Field(0.9, ge=0, le=1, description="Above it the cheap score is used.")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.column, f"{self.column}_dear"

    @model_validator(mode="after")
    def _in_order(self) -> Cascade:
        if self.surely_low > self.surely_high:
            raise ValueError(f"surely_low = {self.surely_low} is above surely_high = {self.surely_high}")
        return self

    def train(self, folder: Path) -> dict[str, float]:
        """Trains both, each in a folder of its own; returns their measures with the prefixes cheap_ and dear_."""
        found = {}
        for name, scorer in self._both():
            figures = scorer.train(folder / self.column / name)
            found |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return found

    def open(self, folder: Path) -> _Opened:
        """Both scorers as trained in `folder`."""
        cheap, dear = (scorer.open(folder / self.column / name) for name, scorer in self._both())
        return _Opened(self, cheap, dear)

    def _both(self) -> tuple[tuple[str, Scorer], tuple[str, Scorer]]:
        return ("cheap", self.cheap), ("dear", self.dear)  # type: ignore[return-value]


class _Opened(NamedTuple):
    spec: Cascade
    cheap: Opened
    dear: Opened

    def __repr__(self) -> str:
        spec = self.spec
        return f"cascade {spec.column} {spec.surely_low} {spec.surely_high} {self.cheap!r} {self.dear!r}"

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        """{column: float32 [n], column_dear: bool [n]}: the score, and whether the expensive scorer gave it."""
        spec = self.spec
        scores = self.cheap.columns(texts)[spec.cheap.column].copy()  # type: ignore[attr-defined]
        unsure = (scores >= spec.surely_low) & (scores <= spec.surely_high)
        places = np.flatnonzero(unsure)
        if len(places):
            scores[places] = self.dear.columns(chosen(texts, places))[spec.dear.column]  # type: ignore[attr-defined]
        return {spec.column: scores, f"{spec.column}_dear": unsure}


def chosen(texts: Texts, places: np.ndarray) -> Texts:
    """The texts with indices `places`, copied and concatenated."""
    starts, ends = texts.offsets[places], texts.offsets[places + 1]
    offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64)
    parts = [texts.data[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    return Texts(np.concatenate(parts) if parts else texts.data[:0], offsets)
