"""Hashed logistic regression: separates good from bad texts by their words, at tens of megabytes a second."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.durable import write_atomic
from hone.base.errors import ArtifactError, MissingExtra
from hone.data.quality.seeds import Examples, Known, Seeded
from hone.text.batch import Texts


class HashedLogistic(Seeded):
    """Logistic regression on hashed TF-IDF of word n-grams, trained on good and bad texts. Li et al. 2024, arXiv:2406.11794."""

    paper: ClassVar[str] = "arXiv:2406.11794"

    log_buckets: int = Field(18, ge=10, le=24, description="log2 of the number of weights.")
    word_runs: int = Field(2, ge=1, le=3, description="Longest n-gram of words that is a feature.")
    letter_run: int = Field(0, ge=0, le=8, description="Length of letter n-grams that are features too; 0: none.")
    epochs: int = Field(5, ge=1, description="Epochs over the seeds.")
    learning_rate: float = Field(0.3, gt=0, description="AdaGrad's step.")
    weight_decay: float = Field(1e-6, ge=0, description="L2 penalty on each weight, applied when its feature occurs.")

    def open(self, folder: Path) -> _Opened:
        """The model in `folder`."""
        return _Opened(self, _Model.read(self._path(folder)))

    def known(self, folder: Path) -> Known:
        model = _Model.read(self._path(folder))
        return Known(model.made_by, model.figures)

    def fit(self, examples: Examples, made_by: str, folder: Path) -> None:
        """Writes <column>.npz."""
        write_atomic(self._path(folder), self._fit(examples)._replace(made_by=made_by).to_bytes())

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.column}.npz"

    def _fit(self, examples: Examples) -> _Model:
        features, table = _kernels()
        learn = np.flatnonzero(~examples.held)
        texts = Texts.of([examples.texts[place] for place in learn])
        targets = examples.targets[learn]
        runs = (table, self.word_runs, self.letter_run, self.log_buckets)
        seen = features.frequencies(*texts, *runs)
        idf = np.log((1 + len(learn)) / (1 + seen)) + 1
        # Both classes have equal weight, whatever their sizes.
        shares = np.where(targets, 0.5 / targets.mean(), 0.5 / (1 - targets.mean()))
        weights, squares = np.zeros((2, (1 << self.log_buckets) + 1))
        for number in range(self.epochs):
            order = np.argsort(np.random.PCG64([self.seed, number]).random_raw(len(learn)), kind="stable")
            features.epoch(
                *texts,
                *runs,
                idf,
                targets.astype(float),
                shares,
                order,
                self.learning_rate,
                self.weight_decay,
                weights,
                squares,
            )
        model = _Model(weights[:-1].astype(np.float32), idf.astype(np.float32), float(weights[-1]), {})
        tested = Texts.of([examples.texts[place] for place in np.flatnonzero(examples.held)])
        return model._replace(figures=examples.figures(_Opened(self, model).columns(tested)[self.column]))


class _Model(NamedTuple):
    """`weights`, `idf` float32 [buckets]; `made_by` is a hash of the spec and the seeds' files."""

    weights: np.ndarray
    idf: np.ndarray
    bias: float
    figures: dict[str, float]
    made_by: str = ""

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        about = json.dumps({"bias": self.bias, "figures": self.figures, "made_by": self.made_by}).encode()
        np.savez(buffer, weights=self.weights, idf=self.idf, about=np.frombuffer(about, np.uint8))
        return buffer.getvalue()

    @classmethod
    def read(cls, path: Path) -> _Model:
        try:
            with np.load(path) as arrays:
                about = json.loads(arrays["about"].tobytes())
                weights, idf = arrays["weights"], arrays["idf"]
                if (
                    weights.ndim != 1
                    or weights.shape != idf.shape
                    or weights.dtype != np.float32
                    or idf.dtype != np.float32
                ):
                    raise ValueError(f"arrays of {weights.shape} and {idf.shape}")
                return cls(weights, idf, about["bias"], about["figures"], about["made_by"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(
                f"{path} is not a scorer's model: {error}", fix="delete it and run the data stage again"
            ) from None


class _Opened(NamedTuple):
    spec: HashedLogistic
    model: _Model

    def __repr__(self) -> str:
        """Identifies the result: all that decides the columns, without the weights themselves."""
        return f"hashed_logistic {self.spec.column} {self.model.made_by}"

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        """{column: float32 [n]}: the probability that a text is good, at a prior of one half."""
        features, table = _kernels()
        spec, model = self.spec, self.model
        margins = features.margins(
            *texts, table, spec.word_runs, spec.letter_run, spec.log_buckets, model.weights, model.idf, model.bias
        )
        return {spec.column: (1 / (1 + np.exp(-margins))).astype(np.float32)}


def _kernels():
    """(the module of kernels, the table of letters); imported on use, since specs must load without numba."""
    MissingExtra.need("hashed_logistic", "numba", "data")
    from hone.text import features
    from hone.text.hashing import word_table

    return features, word_table()
