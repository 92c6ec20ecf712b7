"""PackedTokens: reads packed token shards by memory map and cuts them into shuffled training batches, a pure function of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.errors import ArtifactError, SpecError

IGNORE = -100
"""Target that no loss may count: the next document's first token, and padding."""


class Batch(NamedTuple):
    """`tokens` and `targets` int64 [B, S] (IGNORE where there is nothing to predict), `document_ids` int32 [B, S].

    `document_ids` number the documents inside each row from 0; padding has -1. Equal ids may see each other.
    """

    tokens: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray


class Packing(NamedTuple):
    """What cutting a split into rows costs: of `positions` input positions, `padding` hold nothing and `borders` have no target."""

    rows: int
    positions: int
    padding: int
    borders: int

    @property
    def waste(self) -> float:
        """Fraction of computed positions that no loss learns from."""
        return (self.padding + self.borders) / self.positions if self.positions else 0.0


class PackedTokens:
    """One split of a data artifact: all its documents end to end, each closed by the end-of-text token.

    `tokens` is the memory map (uint16 or uint32 [num_tokens]), `starts` int64 [num_documents + 1] where each document begins.
    Raises ArtifactError when the folder holds no packed tokens or they do not fit their description.
    """

    def __init__(self, folder: Path | str, split: str = "train") -> None:
        folder = Path(folder) / "tokens"
        self.split = split
        self.meta = _read_meta(folder)
        damaged = ArtifactError(
            f"{folder}: {split}.starts.npy or meta.json is corrupt",
            fix="delete the folder and run its data stage again",
        )
        if split not in self.meta["splits"]:
            raise SpecError(
                f"{folder.parent} has no split '{split}'", fix=f"its splits are: {', '.join(self.meta['splits'])}"
            )
        row = self.meta["splits"][split]
        path = folder / f"{split}.bin"
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        size = path.stat().st_size if path.exists() else -1
        if size != row["tokens"] * dtype.itemsize:
            raise ArtifactError(
                f"{path} has {max(size, 0)} bytes, meta.json promises {row['tokens']} tokens of {dtype.itemsize} bytes",
                fix="delete the folder and run its data stage again",
            )
        # An empty file cannot be mapped.
        self.tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
        try:
            self.starts = np.load(folder / f"{split}.starts.npy")
        except (OSError, ValueError, EOFError):
            raise damaged from None
        if self.starts.shape != (row["documents"] + 1,) or self.starts[-1] != row["tokens"]:
            raise damaged
        self._orders: dict[tuple[int, int, int], np.ndarray] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens (the end-of-text tokens stand for none)."""
        return self.meta["splits"][self.split]["bytes"]

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.meta["eos_token_id"]

    def num_rows(self, seq_len: int) -> int:
        """Rows of `seq_len` input positions in one epoch; the last may be padded."""
        return max(-(-(self.num_tokens - 1) // seq_len), 0)

    def packing(self, seq_len: int) -> Packing:
        """What rows of `seq_len` waste."""
        rows = self.num_rows(seq_len)
        if not rows:
            return Packing(0, 0, 0, 0)
        return Packing(rows, rows * seq_len, rows * seq_len - (self.num_tokens - 1), self.num_documents - 1)

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Batch:
        """The batch of optimizer step `step` (from 0): a pure function of its arguments, so a resumed run sees the same data.

        An epoch is every row once, in an order drawn from (seed, epoch). Every token that has a next one in its own
        document is a target's input exactly once an epoch. Raises SpecError when the split has nothing to predict.
        """
        first = step * batch_size
        return self.rows(np.arange(first, first + batch_size, dtype=np.int64), seq_len, seed)

    def rows(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Rows number `indices` (int64 [B]) of the endless shuffled sequence of epochs; what `batch` takes B at a time."""
        num_rows = self.num_rows(seq_len)
        if num_rows < 1:
            raise SpecError(
                f"split '{self.split}' has {self.num_tokens} tokens, too few to predict one",
                fix="give the data stage more text, or loosen its filters",
            )
        windows = [int(self._order(seed, int(index) // num_rows, num_rows)[int(index) % num_rows]) for index in indices]
        return self._cut(np.asarray(windows, np.int64), seq_len)

    def in_order(self, batch_size: int, seq_len: int) -> Iterator[Batch]:
        """One epoch unshuffled, for evaluation; the last batch may have fewer rows."""
        num_rows = self.num_rows(seq_len)
        for first in range(0, num_rows, batch_size):
            yield self._cut(np.arange(first, min(first + batch_size, num_rows), dtype=np.int64), seq_len)

    def documents(self) -> Iterator[np.ndarray]:
        """Every document's token ids (int64, end-of-text included) in stored order."""
        for start, end in zip(self.starts[:-1], self.starts[1:]):
            yield self.tokens[start:end].astype(np.int64)

    def _cut(self, windows: np.ndarray, seq_len: int) -> Batch:
        """Rows number `windows` (int64 [B]) of the unshuffled token stream."""
        shape = (len(windows), seq_len + 1)
        tokens = np.full(shape, self.eos_token_id, np.int64)
        owners = np.full(shape, -1, np.int64)  # the document each token belongs to
        for row, window in enumerate(windows):
            start = int(window) * seq_len
            end = min(start + seq_len + 1, self.num_tokens)  # one beyond the inputs, which the next row begins with
            tokens[row, : end - start] = self.tokens[start:end]
            owners[row, : end - start] = np.searchsorted(self.starts, np.arange(start, end), side="right") - 1
        inside = (owners[:, :-1] == owners[:, 1:]) & (owners[:, 1:] >= 0)
        owners = owners[:, :-1]
        ids = np.where(owners >= 0, owners - owners[:, :1], -1)
        # The stream's last token is a target only; where padding follows it stands at an input position, alone and untrained.
        return Batch(tokens[:, :-1].copy(), np.where(inside, tokens[:, 1:], IGNORE), ids.astype(np.int32))

    def _order(self, seed: int, epoch: int, num_rows: int) -> np.ndarray:
        """The permutation of one epoch, kept while it is in use.

        Sorted raw PCG64 output, not Generator.permutation: only the raw stream is promised to stay the same across numpy versions.
        """
        key = (seed, epoch, num_rows)
        if key not in self._orders:
            while len(self._orders) >= 2:  # a batch can span two epochs
                self._orders.pop(next(iter(self._orders)))
            keys = np.random.PCG64([seed, epoch]).random_raw(num_rows)
            self._orders[key] = np.argsort(keys, kind="stable")
        return self._orders[key]


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.exists():
        raise ArtifactError(
            f"{folder.parent} holds no packed tokens (no {path.name} in {folder.name}/)",
            fix="point at the folder of a data stage",
        )
    try:
        meta = json.loads(path.read_text(encoding="utf8"))
        np.dtype(meta["dtype"]).newbyteorder("<")
        for row in meta["splits"].values():
            row["tokens"] + row["documents"] + row["bytes"] + meta["vocab_size"]  # all there, all numbers
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is corrupt: {type(error).__name__} {error}", fix="delete the folder and run its data stage again"
        ) from None
    return meta
