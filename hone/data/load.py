"""PackedTokens: reads packed token shards by memory map and cuts them into shuffled training batches, a pure function of the step.

Anything with `batch` is a Feed that a training can read: PackedTokens itself, a curriculum's order of it (data/order),
or a mixture of several (data/mix).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hone.base.errors import ArtifactError, SpecError
from hone.data.order.documents import columns_of
from hone.data.tokens.rows import RowIndex, best_fit_count, best_fit_rows

_KEPT_COLUMNS = 4
IGNORE = -100
"""Target that no loss may count: the next document's first token, and padding."""


class Batch(NamedTuple):
    """`tokens` and `targets` int64 [B, S] (IGNORE where there is nothing to predict), `document_ids` int32 [B, S].

    `document_ids` number the documents inside each row from 0; padding has -1. Equal ids may see each other.
    """

    tokens: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray


class Feed(Protocol):
    """Where a training's batches come from: rows of an endless sequence that depends on nothing but the seed."""

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Batch:
        """The batch of optimizer step `step` (from 0): a pure function of its arguments, so a resumed run sees the same data."""
        first = step * batch_size
        return self.rows(np.arange(first, first + batch_size, dtype=np.int64), seq_len, seed)

    def rows(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Rows number `indices` (int64 [B], from 0) of the sequence; step s of batches of B takes s B .. s B + B - 1."""


class Packing(NamedTuple):
    """What cutting a split into rows costs: of `positions` input positions, `padding` hold nothing and `borders` have no target.

    `parted` documents lie in more than one row.
    """

    rows: int
    positions: int
    padding: int
    borders: int
    parted: int = 0

    @property
    def waste(self) -> float:
        """Fraction of computed positions that no loss learns from."""
        return (self.padding + self.borders) / self.positions if self.positions else 0.0


class PackedTokens(Feed):
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
        self.folder = folder.parent
        self.num_bytes = int(row["bytes"])
        """UTF-8 bytes of the text behind the tokens (the end-of-text tokens stand for none)."""
        self._indices: dict[int, RowIndex] = {}
        self._indexed: tuple[int, ...] = tuple(self.meta.get("packing", {}).get("lengths", ()))
        self._orders: dict[tuple[int, int, int], np.ndarray] = {}
        self._columns: dict[str, np.ndarray] = {}

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.meta["eos_token_id"]

    def num_rows(self, seq_len: int) -> int:
        """Rows of `seq_len` input positions in one epoch; the last may be padded."""
        if self.kind == "best_fit":
            return self.row_index(seq_len).num_rows
        return max(-(-(self.num_tokens - 1) // seq_len), 0)

    @property
    def kind(self) -> str:
        """How rows are made: 'stream' cuts at every row's end, 'best_fit' keeps documents whole."""
        return self.meta.get("packing", {}).get("kind", "stream")

    def row_index(self, seq_len: int) -> RowIndex:
        """The best-fit rows of `seq_len`: mapped where the data stage wrote them, computed otherwise."""
        if seq_len not in self._indices:
            if seq_len in self._indexed:
                self._indices[seq_len] = RowIndex.open(self.folder / "tokens", self.split, seq_len)
            else:
                self._indices[seq_len] = best_fit_rows(self.starts, seq_len)
        return self._indices[seq_len]

    def packing(self, seq_len: int, kind: str = "") -> Packing:
        """What rows of `seq_len` waste, made as `kind` says; none: as this split's are."""
        predictions = np.maximum(np.diff(self.starts) - 1, 0)
        if (kind or self.kind) == "best_fit":
            rows = (
                self.row_index(seq_len).num_rows if seq_len in self._indices else best_fit_count(self.starts, seq_len)
            )
            positions = rows * seq_len
            parted = int((predictions > seq_len).sum())
            return Packing(rows, positions, positions - int(predictions.sum()), 0, parted)
        rows = max(-(-(self.num_tokens - 1) // seq_len), 0)
        if not rows:
            return Packing(0, 0, 0, 0)
        last = self.starts[:-1] + np.maximum(predictions - 1, 0)  # the last input of each document that has a target
        parted = int((self.starts[:-1] // seq_len != last // seq_len).sum())
        return Packing(rows, rows * seq_len, rows * seq_len - (self.num_tokens - 1), self.num_documents - 1, parted)

    def rows(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Rows number `indices` (int64 [B]) of the endless shuffled sequence of epochs; what `batch` takes B at a time.

        An epoch is every row once, in an order drawn from (seed, epoch). Every token that has a next one in its own
        document is a target's input exactly once an epoch. Raises SpecError when the split has nothing to predict.
        """
        num_rows = self.need_rows(seq_len)
        windows = [int(self.order(seed, int(index) // num_rows, num_rows)[int(index) % num_rows]) for index in indices]
        return self.cut(np.asarray(windows, np.int64), seq_len)

    def need_rows(self, seq_len: int) -> int:
        """`num_rows`; raises SpecError when there is none."""
        num_rows = self.num_rows(seq_len)
        if num_rows < 1:
            raise SpecError(
                f"split '{self.split}' has {self.num_tokens} tokens, too few to predict one",
                fix="give the data stage more text, or loosen its filters",
            )
        return num_rows

    def in_order(self, batch_size: int, seq_len: int) -> Iterator[Batch]:
        """One epoch unshuffled, for evaluation; the last batch may have fewer rows."""
        num_rows = self.num_rows(seq_len)
        for first in range(0, num_rows, batch_size):
            yield self.cut(np.arange(first, min(first + batch_size, num_rows), dtype=np.int64), seq_len)

    def documents(self) -> Iterator[np.ndarray]:
        """Every document's token ids (int64, end-of-text included) in stored order."""
        for start, end in zip(self.starts[:-1], self.starts[1:]):
            yield self._read(int(start), int(end)).astype(np.int64)

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        """Columns of the documents table, in the order of the documents here. Raises SpecError for an unknown column,
        ArtifactError when the artifact keeps no documents, MissingExtra without pyarrow."""
        missing = [name for name in names if name not in self._columns]
        read = columns_of(self.folder, self.split, missing, self.num_documents) if missing else {}
        known = {**self._columns, **read}
        # Parts of one split ask for the same few columns, one part after the other.
        self._columns = dict([*known.items()][-_KEPT_COLUMNS:])
        return {name: known[name] for name in names}

    def part(self, documents: np.ndarray) -> Part:
        """Only the documents numbered `documents` (int64, rising), end to end as if the others were not there."""
        return Part(self, documents)

    def cut(self, windows: np.ndarray, seq_len: int) -> Batch:
        """Rows number `windows` (int64 [B]) of the unshuffled token stream, or of its best-fit rows."""
        if self.kind == "best_fit":
            return self._gather(windows, seq_len)
        shape = (len(windows), seq_len + 1)
        tokens = np.full(shape, self.eos_token_id, np.int64)
        owners = np.full(shape, -1, np.int64)  # the document each token belongs to
        for row, window in enumerate(windows):
            start = int(window) * seq_len
            end = min(start + seq_len + 1, self.num_tokens)  # one beyond the inputs, which the next row begins with
            tokens[row, : end - start] = self._read(start, end)
            owners[row, : end - start] = self._owners(start, end)
        inside = (owners[:, :-1] == owners[:, 1:]) & (owners[:, 1:] >= 0)
        owners = owners[:, :-1]
        ids = np.where(owners >= 0, owners - owners[:, :1], -1)
        # The stream's last token is a target only; where padding follows it stands at an input position, alone and untrained.
        return Batch(tokens[:, :-1].copy(), np.where(inside, tokens[:, 1:], IGNORE), ids.astype(np.int32))

    def _gather(self, windows: np.ndarray, seq_len: int) -> Batch:
        """Best-fit rows number `windows`: their pieces side by side, then padding."""
        index = self.row_index(seq_len)
        shape = (len(windows), seq_len)
        tokens = np.full(shape, self.eos_token_id, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        ids = np.full(shape, -1, np.int32)
        for row, window in enumerate(windows):
            place = 0
            pieces = index.pieces[index.firsts[window] : index.firsts[window + 1]]
            for number, (start, size) in enumerate(pieces.tolist()):
                piece = self._read(start, start + size + 1)
                tokens[row, place : place + size] = piece[:-1]
                targets[row, place : place + size] = piece[1:]
                ids[row, place : place + size] = number
                place += size
        return Batch(tokens, targets, ids)

    def _read(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` .. `end` of the stream."""
        return self.tokens[start:end]

    def _owners(self, start: int, end: int) -> np.ndarray:
        """The document of each token `start` .. `end`, int64 [end - start]."""
        first, last = np.searchsorted(self.starts, (start, end - 1), side="right") - 1
        borders = np.clip(self.starts[first : last + 2], start, end)
        return np.repeat(np.arange(first, last + 1), np.diff(borders))

    def order(self, seed: int, epoch: int, num_rows: int) -> np.ndarray:
        """The permutation of one epoch, kept while it is in use."""
        key = (seed, epoch, num_rows)
        if key not in self._orders:
            while len(self._orders) >= 2:  # a batch can span two epochs
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = shuffled(num_rows, seed, epoch)
        return self._orders[key]


class Part(PackedTokens):
    """Some documents of a split, read as a stream of their own; nothing is copied.

    `numbers` (int64 [num_documents]) are the documents' places in the whole split.
    """

    def __init__(self, whole: PackedTokens, documents: np.ndarray) -> None:
        assert (np.diff(documents) > 0).all(), "documents of a part are numbered upwards"
        assert type(whole) is PackedTokens, "a part is cut from a whole split"
        self.split, self.meta, self.folder, self.tokens = whole.split, whole.meta, whole.folder, whole.tokens
        self.numbers = documents
        sizes = whole.starts[documents + 1] - whole.starts[documents]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._shifts = whole.starts[documents] - self.starts[:-1]
        self.num_bytes = int(whole.columns("bytes")["bytes"][documents].sum())
        self._whole = whole
        self._indices, self._indexed = {}, ()
        self._orders = {}

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        return {name: values[self.numbers] for name, values in self._whole.columns(*names).items()}

    def _read(self, start: int, end: int) -> np.ndarray:
        return self.tokens[np.arange(start, end) + self._shifts[self._owners(start, end)]]


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """A permutation of 0 .. count - 1 (int64) drawn from `seeds`.

    Sorted raw PCG64 output, not Generator.permutation: only the raw stream is promised to stay the same across numpy versions.
    """
    return np.argsort(np.random.PCG64([*seeds]).random_raw(count), kind="stable")


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
        if meta.get("packing", {"kind": "stream"})["kind"] not in ("stream", "best_fit"):
            raise ValueError(f"unknown packing {meta['packing']}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is corrupt: {type(error).__name__} {error}", fix="delete the folder and run its data stage again"
        ) from None
    return meta
