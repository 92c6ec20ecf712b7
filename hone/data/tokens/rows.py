"""Rows: how packed tokens are cut into training rows, as settings and as an index beside the tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from hone.base.errors import ArtifactError, MissingExtra
from hone.base.lazy import lazy
from hone.base.spec import Spec

np = lazy("numpy")


class Rows(Spec):
    """How token streams become rows for training; `packing: best_fit` is short for its kind."""

    kind: Literal["stream", "best_fit"] = Field(
        "stream",
        description="stream: one stream cut at every row's end; best_fit: whole documents, placed where they leave least room "
        "(Ding et al. 2024, arXiv:2404.10830).",
    )
    lengths: tuple[int, ...] = Field(
        (256, 1024, 4096),
        min_length=1,
        description="Row lengths whose waste is reported; by best_fit their rows are indexed too, others when they are asked for.",
    )
    megatron: bool = Field(
        False, description="Also write <split>.idx, with which Megatron reads <split>.bin as an indexed dataset."
    )

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_kind(cls, values: Any) -> Any:
        return {"kind": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _lengths_are_lengths(self) -> Rows:
        if min(self.lengths) < 1:
            raise ValueError(f"lengths must be 1 or more, got {min(self.lengths)}")
        return self


class RowIndex(NamedTuple):
    """Which pieces of the token stream make up each row of `seq_len` input positions.

    `pieces` int64 [num_pieces, 2]: the first input token and the number of input positions; the targets are the tokens one
    further on. Row r has pieces `firsts[r]` up to `firsts[r + 1]` (int64 [num_rows + 1]), no two of one document.
    """

    seq_len: int
    firsts: np.ndarray
    pieces: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.firsts) - 1

    @property
    def padding(self) -> int:
        """Input positions that hold nothing."""
        return self.num_rows * self.seq_len - int(self.pieces[:, 1].sum())

    def write(self, folder: Path, split: str) -> None:
        """Writes both arrays beside the split's tokens, whole or not at all."""
        for path, array in zip(_paths(folder, split, self.seq_len), (self.pieces, self.firsts)):
            temporary = path.with_name(path.name + ".tmp")
            with open(temporary, "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    @classmethod
    def open(cls, folder: Path, split: str, seq_len: int) -> RowIndex:
        """Maps what `write` wrote. Raises ArtifactError when it is missing or damaged."""
        paths = _paths(folder, split, seq_len)
        try:
            pieces, firsts = (_mapped(path) for path in paths)
            fits = (
                pieces.shape == (len(pieces), 2) and firsts.ndim == 1 and firsts[0] == 0 and firsts[-1] == len(pieces)
            )
            if not fits or pieces.dtype != np.int64 or firsts.dtype != np.int64:
                raise ValueError("they do not fit together")
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise ArtifactError(
                f"{paths[0]} or {paths[1].name} is missing or damaged: {error}",
                fix="delete the folder and run its data stage again",
            ) from None
        return cls(seq_len, firsts, pieces)


def best_fit_rows(starts: np.ndarray, seq_len: int) -> RowIndex:
    """The best-fit rows of documents that begin at `starts` (best_fit.py). Raises MissingExtra without numba."""
    try:
        from hone.data.tokens.best_fit import best_fit
    except ImportError:
        raise MissingExtra.of("best-fit packing", "numba", "data") from None
    return RowIndex(seq_len, *best_fit(starts, seq_len))


def best_fit_count(starts: np.ndarray, seq_len: int) -> int:
    """How many rows that are, without their index. Raises MissingExtra without numba."""
    try:
        from hone.data.tokens.best_fit import num_rows
    except ImportError:
        raise MissingExtra.of("best-fit packing", "numba", "data") from None
    return num_rows(starts, seq_len)


def _paths(folder: Path, split: str, seq_len: int) -> tuple[Path, Path]:
    return folder / f"{split}.pieces-{seq_len}.npy", folder / f"{split}.rows-{seq_len}.npy"


def _mapped(path: Path) -> np.ndarray:
    """The array in `path` by memory map; an empty one cannot be mapped."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:
        return np.load(path)
