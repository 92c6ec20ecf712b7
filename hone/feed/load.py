"""PackedTokens: reads packed token shards by memory map and cuts them into shuffled training batches, a pure function of the step.

Anything with `batch` is a Feed for training: PackedTokens itself, a curriculum's order of it (feed/order),
or a mixture of several (feed/mix).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hone.base.errors import ArtifactError, SpecError
from hone.feed.order.documents import columns_of
from hone.feed.packing import PackingIndex, best_fit_count, best_fit_index

_KEPT_COLUMNS = 4
IGNORE = -100
"""Target to be ignored by every loss: the first token of the next document, padding, and what is not trained on."""


class Batch(NamedTuple):
    """`tokens` and `targets` int64 [B, S] (IGNORE where there is no target), `document_ids` int32 [B, S].

    `document_ids` number the documents inside each sequence from 0; padding has -1. Tokens of equal ids attend to each other.
    """

    tokens: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray


class Feed(Protocol):
    """Source of training batches: sequences of an endless stream that depends on the seed alone."""

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Batch:
        """The batch of optimizer step `step` (from 0): a pure function of its arguments, so a resumed run sees the same data."""
        first = step * batch_size
        return self.sequences(np.arange(first, first + batch_size, dtype=np.int64), seq_len, seed)

    def sequences(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Sequences with indices `indices` (int64 [B], from 0) of the stream; step s of batches of B takes s B .. s B + B - 1."""


class Packing(NamedTuple):
    """Cost of cutting a split into sequences: of `positions` input positions, `padding` are padding and `borders` have no target.

    `parted` documents are split over several sequences. A position is padding where `Batch.document_ids` has -1.
    """

    num_sequences: int
    positions: int
    padding: int
    borders: int
    parted: int = 0

    @property
    def tokens(self) -> int:
        """Input tokens of one epoch, padding left out."""
        return self.positions - self.padding

    @property
    def waste(self) -> float:
        """Fraction of computed positions without a target."""
        return (self.padding + self.borders) / self.positions if self.positions else 0.0


class PackedTokens(Feed):
    """One split of a data artifact: all its documents concatenated, each followed by the end-of-text token.

    `tokens` is the memory map (uint16 or uint32 [num_tokens]), `starts` int64 [num_documents + 1] where each document begins.
    Raises ArtifactError when the folder has no packed tokens or they do not match meta.json.
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
                f"{path} has {max(size, 0)} bytes, but meta.json lists {row['tokens']} tokens of {dtype.itemsize} bytes",
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
        self.trained = self._marks(folder / f"{split}.trained.bin")
        """uint8 [num_tokens]: bit 0 where a token is a target, bit 1 in a rejected or undesirable answer (hone.feed.conversations); None: all
        are."""
        self.folder = folder.parent
        self.num_bytes = int(row["bytes"])
        """UTF-8 bytes of the tokens' text (0 for the end-of-text tokens)."""
        self._indices: dict[int, PackingIndex] = {}
        self._indexed: tuple[int, ...] = tuple(self.meta.get("packing", {}).get("lengths", ()))
        self._orders: dict[tuple[int, int, int], np.ndarray] = {}
        self._columns: dict[str, np.ndarray] = {}

    def _marks(self, path: Path) -> np.ndarray | None:
        """The marks of targets beside the tokens. Raises ArtifactError when they do not match them."""
        if self.meta.get("targets", "all") == "all":
            return None
        size = path.stat().st_size if path.exists() else -1
        if size != len(self.tokens):
            raise ArtifactError(
                f"{path} has {max(size, 0)} bytes, but there are {len(self.tokens)} tokens",
                fix="delete the folder and run its data stage again",
            )
        return np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def scored(self) -> tuple[int, int]:
        """(tokens, bytes of their text) of what a loss is a mean over: all of the text, of conversations what is trained on."""
        if self.trained is None:
            return self.num_tokens, self.num_bytes
        row = self.meta["splits"][self.split]
        return row["trained_tokens"], row["trained_bytes"]

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.meta["eos_token_id"]

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of `seq_len` input positions in one epoch; the last may be padded."""
        if self.is_judged:
            self._need_whole(seq_len)
        if self.kind == "best_fit":
            return self.packing_index(seq_len).num_sequences
        return max(-(-(self.num_tokens - 1) // seq_len), 0)

    @property
    def is_judged(self) -> bool:
        """Whether answers are known to be good or bad: a document is two conversations, with the chosen and the rejected answer
        ('pairs'), or one with a label ('labels')."""
        return self.meta.get("targets") in ("pairs", "labels")

    def _need_whole(self, seq_len: int) -> None:
        """Raises SpecError when a document of answers does not fit into a sequence."""
        sizes = np.diff(self.starts) - 1
        if self.kind != "best_fit":
            raise SpecError(
                f"{self.folder}: answers are packed as a stream, which cuts them", fix="set packing: best_fit"
            )
        if len(sizes) and sizes.max() > seq_len:
            raise SpecError(
                f"{int((sizes > seq_len).sum())} of {len(sizes)} {self.meta['targets']} of {self.folder} are longer than seq_len {seq_len}; the longest has "
                f"{sizes.max()} positions",
                fix=f"set seq_len to {sizes.max()}, or tokenizer.chat.max_tokens of the data to {seq_len}",
            )

    @property
    def kind(self) -> str:
        """The packing: 'stream' cuts at every sequence's end, 'best_fit' keeps documents whole."""
        return self.meta.get("packing", {}).get("kind", "stream")

    def packing_index(self, seq_len: int) -> PackingIndex:
        """The best-fit packing for `seq_len`: mapped where the data stage wrote it, else computed."""
        if seq_len not in self._indices:
            if seq_len in self._indexed:
                self._indices[seq_len] = PackingIndex.open(self.folder / "tokens", self.split, seq_len)
            else:
                self._indices[seq_len] = best_fit_index(self.starts, seq_len)
        return self._indices[seq_len]

    def packing(self, seq_len: int, kind: str = "") -> Packing:
        """The cost of packing `kind` (default: this split's) for sequences of `seq_len` tokens."""
        predictions = np.maximum(np.diff(self.starts) - 1, 0)
        if (kind or self.kind) == "best_fit":
            known = seq_len in self._indices or seq_len in self._indexed
            count = self.packing_index(seq_len).num_sequences if known else best_fit_count(self.starts, seq_len)
            positions = count * seq_len
            parted = int((predictions > seq_len).sum())
            return Packing(count, positions, positions - int(predictions.sum()), 0, parted)
        count = max(-(-(self.num_tokens - 1) // seq_len), 0)
        if not count:
            return Packing(0, 0, 0, 0)
        last = self.starts[:-1] + np.maximum(predictions - 1, 0)  # the last input of each document that has a target
        parted = int((self.starts[:-1] // seq_len != last // seq_len).sum())
        positions, targets = count * seq_len, int(predictions.sum())
        padding = max(positions - self.num_tokens, 0)  # before padding the last token is an input, as in `cut`
        return Packing(count, positions, padding, positions - padding - targets, parted)

    def sequences(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        """Sequences with indices `indices` (int64 [B]) of the endless shuffled stream of epochs; `batch` takes B at a time.

        An epoch is every sequence once, in an order drawn from (seed, epoch). Every token that has a next one in its own
        document is an input with a target exactly once per epoch. Raises SpecError when the split has no target.
        """
        count = self.need_sequences(seq_len)
        windows = [int(self.order(seed, int(index) // count, count)[int(index) % count]) for index in indices]
        return self.cut(np.asarray(windows, np.int64), seq_len)

    def need_sequences(self, seq_len: int) -> int:
        """`num_sequences`; raises SpecError when it is 0."""
        count = self.num_sequences(seq_len)
        if count < 1:
            raise SpecError(
                f"split '{self.split}' has {self.num_tokens} tokens, too few for one target",
                fix="give the data stage more text, or loosen its filters",
            )
        return count

    def in_order(self, batch_size: int, seq_len: int) -> Iterator[Batch]:
        """One epoch unshuffled, for evaluation; the last batch may have fewer sequences."""
        count = self.num_sequences(seq_len)
        for first in range(0, count, batch_size):
            yield self.cut(np.arange(first, min(first + batch_size, count), dtype=np.int64), seq_len)

    def documents(self) -> Iterator[np.ndarray]:
        """Every document's token ids (int64, end-of-text included) in stored order."""
        for start, end in zip(self.starts[:-1], self.starts[1:]):
            yield self._read(int(start), int(end)).astype(np.int64)

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        """Columns of the documents table, in the order of the documents here. Raises SpecError for an unknown column,
        ArtifactError when the artifact has no documents table, MissingExtra without pyarrow."""
        missing = [name for name in names if name not in self._columns]
        read = columns_of(self.folder, self.split, missing, self.num_documents) if missing else {}
        known = {**self._columns, **read}
        # All parts of a split read the same few columns, one part after the other.
        self._columns = dict([*known.items()][-_KEPT_COLUMNS:])
        return {name: known[name] for name in names}

    def part(self, documents: np.ndarray) -> Part:
        """Only the documents numbered `documents` (int64, ascending), concatenated as if the others did not exist."""
        return Part(self, documents)

    def cut(self, windows: np.ndarray, seq_len: int) -> Batch:
        """Sequences with indices `windows` (int64 [B]) of the unshuffled token stream, or of the best-fit packing."""
        if self.kind == "best_fit":
            return self._gather(windows, seq_len)
        shape = (len(windows), seq_len + 1)
        tokens = np.full(shape, self.eos_token_id, np.int64)
        owners = np.full(shape, -1, np.int64)  # the document each token belongs to
        marked = np.ones(shape, bool)  # whether it is a target
        for row, window in enumerate(windows):
            start = int(window) * seq_len
            end = min(start + seq_len + 1, self.num_tokens)  # and the next sequence's first, as a target
            tokens[row, : end - start] = self._read(start, end)
            owners[row, : end - start] = self._owners(start, end)
            if self.trained is not None:
                marked[row, : end - start] = self._trained(start, end)
        inside = (owners[:, :-1] == owners[:, 1:]) & (owners[:, 1:] >= 0) & marked[:, 1:]
        owners = owners[:, :-1]
        ids = np.where(owners >= 0, owners - owners[:, :1], -1)
        # The stream's last token is a target only; before padding it is also an input, alone and without a target.
        return Batch(tokens[:, :-1].copy(), np.where(inside, tokens[:, 1:], IGNORE), ids.astype(np.int32))

    def _gather(self, windows: np.ndarray, seq_len: int) -> Batch:
        """Best-fit sequences `windows`: their documents side by side, then padding."""
        index = self.packing_index(seq_len)
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
                if self.trained is not None:
                    marked = self._trained(start + 1, start + size + 1)
                    targets[row, place : place + size][~marked] = IGNORE
                ids[row, place : place + size] = number
                if self.is_judged:  # good answers have even numbers, bad ones odd; a pair is 2k and 2k + 1
                    ids[row, place : place + size] += number + (self.trained[start : start + size] >> 1)
                place += size
        return Batch(tokens, targets, ids)

    def _read(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` .. `end` of the stream."""
        return self.tokens[start:end]

    def _trained(self, start: int, end: int) -> np.ndarray:
        """Whether each of the tokens `start` .. `end` is a target, bool [end - start]; only where some are not."""
        assert self.trained is not None, "every token is a target"
        return self.trained[start:end] & 1 != 0

    def _owners(self, start: int, end: int) -> np.ndarray:
        """The document of each token `start` .. `end`, int64 [end - start]."""
        first, last = np.searchsorted(self.starts, (start, end - 1), side="right") - 1
        borders = np.clip(self.starts[first : last + 2], start, end)
        return np.repeat(np.arange(first, last + 1), np.diff(borders))

    def order(self, seed: int, epoch: int, num_sequences: int) -> np.ndarray:
        """The permutation of one epoch, cached."""
        key = (seed, epoch, num_sequences)
        if key not in self._orders:
            while len(self._orders) >= 2:  # a batch can span two epochs
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = shuffled(num_sequences, seed, epoch)
        return self._orders[key]


class Part(PackedTokens):
    """Some documents of a split, read as a stream of their own without copying.

    `numbers` (int64 [num_documents]) are the documents' indices in the whole split.
    """

    def __init__(self, whole: PackedTokens, documents: np.ndarray) -> None:
        assert (np.diff(documents) > 0).all(), "documents of a part must be in ascending order"
        assert type(whole) is PackedTokens, "a part must be cut from a whole split"
        self.split, self.meta, self.folder, self.tokens = whole.split, whole.meta, whole.folder, whole.tokens
        self.numbers, self.trained = documents, whole.trained
        sizes = whole.starts[documents + 1] - whole.starts[documents]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._shifts = whole.starts[documents] - self.starts[:-1]
        self.num_bytes = int(whole.columns("bytes")["bytes"][documents].sum())
        self._whole = whole
        self._indices, self._indexed = {}, ()
        self._orders = {}

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        return {name: values[self.numbers] for name, values in self._whole.columns(*names).items()}

    @property
    def scored(self) -> tuple[int, int]:
        if self.trained is None:
            return self.num_tokens, self.num_bytes
        count, (tokens, num_bytes) = int(self._trained(0, self.num_tokens).sum()), self._whole.scored
        return count, round(count * num_bytes / max(tokens, 1))

    def _read(self, start: int, end: int) -> np.ndarray:
        return self.tokens[self._places(start, end)]

    def _trained(self, start: int, end: int) -> np.ndarray:
        return self.trained[self._places(start, end)] & 1 != 0  # type: ignore[index]

    def _places(self, start: int, end: int) -> np.ndarray:
        """Where tokens `start` .. `end` of the part are in the whole."""
        return np.arange(start, end) + self._shifts[self._owners(start, end)]


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """A permutation of 0 .. count - 1 (int64) drawn from `seeds`.

    Sorted raw PCG64 output, not Generator.permutation: only the raw stream is guaranteed not to change between numpy versions.
    """
    return np.argsort(np.random.PCG64([*seeds]).random_raw(count), kind="stable")


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.exists():
        raise ArtifactError(
            f"{folder.parent} has no packed tokens (no {path.name} in {folder.name}/)",
            fix="give the folder of a data stage",
        )
    try:
        meta = json.loads(path.read_text(encoding="utf8"))
        np.dtype(meta["dtype"]).newbyteorder("<")
        for row in meta["splits"].values():
            row["tokens"] + row["documents"] + row["bytes"] + meta["vocab_size"]  # raises unless all are numbers
        if meta.get("packing", {"kind": "stream"})["kind"] not in ("stream", "best_fit"):
            raise ValueError(f"unknown packing {meta['packing']}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is corrupt: {type(error).__name__} {error}", fix="delete the folder and run its data stage again"
        ) from None
    return meta
