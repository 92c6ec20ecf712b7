"""Packing: how packed tokens are cut into training sequences, as settings and as an index beside the tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from hone.base.errors import ArtifactError, MissingExtra
from hone.base.spec import Spec


class PackingSpec(Spec):
    """How token streams are cut into sequences for training; `packing: best_fit` is short for `{kind: best_fit}`."""

    kind: Literal["stream", "best_fit"] = Field(
        "stream",
        description="stream: one stream cut at every sequence's end; best_fit: whole documents, each in the sequence with the least sufficient space "
        "(Ding et al. 2024, arXiv:2404.10830).",
    )
    lengths: tuple[int, ...] = Field(
        (256, 1024, 4096),
        min_length=1,
        description="Sequence lengths whose waste is reported; best_fit also indexes them now, other lengths on first use.",
    )
    megatron: bool = Field(
        False, description="Also write <split>.idx, with which Megatron reads <split>.bin as an indexed dataset."
    )

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_kind(cls, values: Any) -> Any:
        return {"kind": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _lengths_are_lengths(self) -> PackingSpec:
        if min(self.lengths) < 1:
            raise ValueError(f"lengths must be 1 or more, got {min(self.lengths)}")
        return self


class PackingIndex(NamedTuple):
    """The pieces of the token stream in each sequence of `seq_len` input positions.

    `pieces` int64 [num_pieces, 2]: the first input token and the number of input positions; the targets are one token
    later. Sequence r has pieces `firsts[r]` up to `firsts[r + 1]` (int64 [num_sequences + 1]), at most one per document.
    """

    seq_len: int
    firsts: np.ndarray
    pieces: np.ndarray

    @property
    def num_sequences(self) -> int:
        return len(self.firsts) - 1

    @property
    def padding(self) -> int:
        """Input positions that are padding."""
        return self.num_sequences * self.seq_len - int(self.pieces[:, 1].sum())

    def write(self, folder: Path, split: str) -> None:
        """Writes both arrays beside the split's tokens, atomically."""
        for path, array in zip(_paths(folder, split, self.seq_len), (self.pieces, self.firsts)):
            temporary = path.with_name(path.name + ".tmp")
            with open(temporary, "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    @classmethod
    def open(cls, folder: Path, split: str, seq_len: int) -> PackingIndex:
        """Maps the files of `write`. Raises ArtifactError when they are missing or damaged."""
        paths = _paths(folder, split, seq_len)
        try:
            pieces, firsts = (_mapped(path) for path in paths)
            fits = (
                pieces.shape == (len(pieces), 2) and firsts.ndim == 1 and firsts[0] == 0 and firsts[-1] == len(pieces)
            )
            if not fits or pieces.dtype != np.int64 or firsts.dtype != np.int64:
                raise ValueError("they do not match")
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise ArtifactError(
                f"{paths[0]} or {paths[1].name} is missing or damaged: {error}",
                fix="delete the folder and run its data stage again",
            ) from None
        return cls(seq_len, firsts, pieces)


def best_fit_index(starts: np.ndarray, seq_len: int) -> PackingIndex:
    """The best-fit packing of documents that begin at `starts` (best_fit.py). Raises MissingExtra without numba."""
    try:
        from hone.feed.best_fit import best_fit
    except ImportError:
        raise MissingExtra.of("best-fit packing", "numba", "data") from None
    return PackingIndex(seq_len, *best_fit(starts, seq_len))


def best_fit_count(starts: np.ndarray, seq_len: int) -> int:
    """The number of its sequences, without the index. Raises MissingExtra without numba."""
    try:
        from hone.feed.best_fit import num_sequences
    except ImportError:
        raise MissingExtra.of("best-fit packing", "numba", "data") from None
    return num_sequences(starts, seq_len)


def _paths(folder: Path, split: str, seq_len: int) -> tuple[Path, Path]:
    return folder / f"{split}.pieces-{seq_len}.npy", folder / f"{split}.rows-{seq_len}.npy"


def _mapped(path: Path) -> np.ndarray:
    """The array in `path`, memory-mapped unless it is empty."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:
        return np.load(path)
