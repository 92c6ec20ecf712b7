"""Trial: a sample goes through every step of the stage, each timed; what is kept of it stands for what will be kept of all."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.data.annotate import annotate
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts
from hone.data.forecasting.duplicates import Copies, left
from hone.data.forecasting.pieces import Piece, Sample, marked, told
from hone.data.language import Identifier
from hone.data.readers.listing import File
from hone.data.results import write_kept
from hone.data.settings import Settings
from hone.data.tokens import tokenizer as tokenizers
from hone.data.tokens.tokenizer import Encoder
from hone.data.work import Models, opened

SHARD_BYTES = 4 << 20
"""Text of the sample that is looked at at once."""
TOKEN_BYTES = 2_000_000
"""Text that is tokenized."""
_PART_CHARS = 2000
_FIRST = "première"
"""Encoded before time is taken: what text beyond ASCII needs is made once."""


class Tools(NamedTuple):
    """What reading needs beside the spec."""

    identifier: Identifier
    models: Models


class Trial(NamedTuple):
    """What a sample gave; arrays have an entry a document.

    `weights` is how many documents of the input one stands for, `sizes` its bytes and `kept` its bytes after all steps, 0 of
    those that went; `piece` its place in the sample's pieces. `copies` says what deduplication left, `cut` the bytes that edits
    took. `seconds` of each step.
    """

    sample: Sample
    piece: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    left: np.ndarray
    copies: Copies | None
    seconds: dict[str, float]
    corpus: Corpus

    @property
    def text_bytes(self) -> float:
        """Bytes of text in all of the input."""
        return float((self.weights * self.sizes).sum())

    @property
    def kept_bytes(self) -> float:
        return float((self.weights * self.kept).sum())

    @property
    def kept_documents(self) -> float:
        return float((self.weights * self.left).sum())


def first(spec: Settings, tools: Tools, sample: Sample, folder: Path) -> float:
    """Loads what is loaded and compiles what is compiled when first used, so that no time of it is counted once a byte.

    Returns the seconds it took: every worker spends them too.
    """
    begun = time.perf_counter()
    for name in ("pyarrow.parquet", "tokenizers"):
        importlib.import_module(name)
    smallest = {piece.file.format: piece for piece in sorted(sample.pieces, key=lambda piece: -piece.file.size)}
    attempt(spec, tools, sample._replace(pieces=list(smallest.values())), folder)
    return time.perf_counter() - begun


def attempt(spec: Settings, tools: Tools, sample: Sample, folder: Path) -> Trial | None:
    """`sample` through reading, filters, deduplication, edits, decontamination and writing; None where it holds no document."""
    folder.mkdir(exist_ok=True)
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        shards = _read(spec, tools, [marked(piece) for piece in sample.pieces], folder)
    corpus = Corpus(shards)
    if not len(corpus):
        return None
    piece = _pieces(corpus, sample.pieces)
    weights = np.array([sample.weights[sample.pieces[place].stratum] for place in piece])
    sizes = corpus.columns["bytes"].astype(float)
    alive = np.ones(len(corpus), bool)
    copies = None
    with timed(seconds, "decide"):
        for technique in spec.filters:
            alive &= technique.decide(corpus.columns)[0]
        if spec.dedups and alive.any():
            clusters = _clusters(spec, corpus, alive, folder)
            there = np.flatnonzero(alive)
            copies = left(clusters[there], piece[there], sample.share)
            kept = np.zeros(len(corpus))
            kept[there] = copies.weights
        else:
            kept = alive.astype(float)
        alive = kept > 0
        for number, technique in enumerate(spec.edits):
            _cut(corpus, alive, technique.cuts(corpus, alive, _made(folder / f"edit-{number}")))
        for number, technique in enumerate(spec.decontaminations):
            found = technique.contaminated(corpus, alive, _made(folder / f"contamination-{number}"))
            alive &= ~found.dropped
            _cut(corpus, alive, found.cuts)
    kept *= alive
    part, size = corpus.parts()[0], corpus.sizes[0]
    with timed(seconds, "write"):
        write_kept(part, {"train": alive[part.first : part.first + size]}, folder / "kept.parquet")
    seconds["write"] *= len(corpus) / max(size, 1)
    return Trial(sample, piece, weights, sizes, kept * corpus.columns["bytes"], kept, copies, seconds, corpus)


class Rate(NamedTuple):
    """`bytes_a_token` over `encoded` bytes; `error` is its relative standard error, `gap` what a vocabulary gains on its own text.

    Where a vocabulary was trained: the different `words` among `encoded` bytes, which grow with the text to the power
    `more_words` (Heaps 1978).
    """

    bytes_a_token: float
    encoded: int
    error: float
    gap: float = 0.0
    words: int = 0
    more_words: float = 1.0


def token_rate(spec: tokenizers.Tokenizer, trial: Trial, folder: Path) -> Rate:
    """The rate of the tokenizer that is taken, or of one trained on half of the kept text.

    Adds the seconds of training and encoding to the trial's.
    """
    parts = _spread(trial, TOKEN_BYTES)
    seconds = trial.seconds
    if spec.path is not None:
        tokenizers.take(spec.path, folder)
        encoder = tokenizers.load(folder)
        encoder.encode([_FIRST])
        with timed(seconds, "encode"):
            return _rate(encoder, parts)
    seen, unseen = parts[::2], parts[1::2]
    with timed(seconds, "train"):
        tokenizers.train(spec, [part.text for part in seen], folder)
    encoder = tokenizers.load(folder)
    encoder.encode([_FIRST])
    with timed(seconds, "encode"):
        known = _rate(encoder, seen)
        new = _rate(encoder, unseen) if unseen else known
    # A vocabulary fits what it was trained on too well; that of the full corpus lies between the two.
    both = (known.bytes_a_token * new.bytes_a_token) ** 0.5
    gap = known.bytes_a_token / new.bytes_a_token - 1
    error = (known.error**2 + new.error**2) ** 0.5 / 2
    some = {word for part in seen for word in part.text.split()}
    every = some.union(word for part in unseen for word in part.text.split())
    power = float(np.log2(len(every) / len(some))) if unseen and some else 1.0
    return Rate(both, known.encoded + (new.encoded if unseen else 0), error, gap, len(every), power)


def _rate(encoder: Encoder, parts: Sequence[_Part]) -> Rate:
    texts = [part.text for part in parts]
    weights = np.array([part.weight for part in parts])
    encoded = np.array([len(text.encode()) for text in texts], float)
    sizes, tokens = weights * encoded, weights * np.array([len(ids) - 1 for ids in encoder.encode(texts)], float)
    apart = np.diff(tokens - sizes * tokens.sum() / max(sizes.sum(), 1))
    error = (len(texts) / max(2 * len(apart), 1) * (apart**2).sum()) ** 0.5 / max(tokens.sum(), 1)
    return Rate(sizes.sum() / max(tokens.sum(), 1), int(encoded.sum()), float(error))


def _read(spec: Settings, tools: Tools, files: Sequence[File], folder: Path) -> list[Path]:
    """Shards of `files` that are small enough for little memory."""
    shards: list[Path] = []
    waiting: list[File] = []
    scorers = opened(spec.scorers, tools.models)
    for number, file in enumerate(files):
        waiting.append(file)
        if sum(one.size for one in waiting) >= SHARD_BYTES or number == len(files) - 1:
            shards.append(folder / f"documents-{len(shards):05d}.parquet")
            annotate(waiting, shards[-1], options=spec.options, scorers=scorers, identifier=tools.identifier)
            waiting = []
    return shards


def _pieces(corpus: Corpus, pieces: Sequence[Piece]) -> np.ndarray:
    """The place in `pieces` of what each document was read from; sources and groups get their own names again."""
    place = {marked(piece).name: number for number, piece in enumerate(pieces)}
    found = np.array([place[source] for source in corpus.columns["source"]], np.int64)
    for name in ("source", "group"):
        column = corpus.columns[name]
        again = {label: told(label)[0] for label in set(column.tolist())}
        corpus.columns.replace(name, np.array([again[label] for label in column.tolist()], column.dtype))
    return found


def _clusters(spec: Settings, corpus: Corpus, alive: np.ndarray, folder: Path) -> np.ndarray:
    """For each document the one that stands for it after all deduplications."""
    stands = np.arange(len(corpus))
    for number, technique in enumerate(spec.dedups):
        living = alive & (stands == np.arange(len(corpus)))
        stands = technique.representatives(corpus, living, _made(folder / f"dedup-{number}"))[stands]
    return stands


def _cut(corpus: Corpus, alive: np.ndarray, cuts: Sequence[Cuts]) -> None:
    """Leaves `cuts` out; who has nothing left is not alive any more."""
    corpus.cut(cuts)
    alive &= corpus.columns["bytes"] > 0


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


class _Part(NamedTuple):
    """A part of a text, and how many like it there are."""

    text: str
    weight: float


def _spread(trial: Trial, num_bytes: int) -> list[_Part]:
    """Parts of the kept texts, about `num_bytes` of them, evenly spread: those that begin in ranges at even distances."""
    stands_for = trial.weights * (trial.left if trial.left.any() else 1.0)
    total = float(trial.sizes[stands_for > 0].sum())
    step = max(total * _PART_CHARS / num_bytes, _PART_CHARS)
    found: list[_Part] = []
    passed = 0
    for _, shard, begin, _ in trial.corpus.spans():
        for index, text in trial.corpus.texts(shard, begin, stands_for > 0):
            for start in range(0, len(text), _PART_CHARS):
                if passed % step < _PART_CHARS:
                    found.append(_Part(text[start : start + _PART_CHARS], float(stands_for[index])))
                passed += min(_PART_CHARS, len(text) - start)
    return found


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
