"""Trial: runs the stage's own steps on a sample, each timed, and measures what they keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.durable import sha256
from hone.base.run import Run
from hone.data.annotate import annotate_items
from hone.data.chain import Chain, NothingLeft
from hone.data.corpus import Corpus
from hone.data.executors.base import Pool
from hone.data.executors.serial import Serial
from hone.data.forecasting.sample import Sample
from hone.data.identifiers.base import Opened
from hone.data.settings import Settings
from hone.data.work import Models, opened
from hone.data.write import take_or_train, tokenize, write_tables

TOKEN_BYTES = 2_000_000
"""Bytes of text to tokenize."""
_LEAST_TEXTS = 64
"""Documents to tokenize at least, where there are so many."""


class Scratch:
    """Folders that the stage's steps write into instead of an artifact's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder / "made", folder / "state"
        for path in (folder, self.folder, self.state):
            path.mkdir(exist_ok=True)

    def keep_time(self) -> None:
        """Does nothing: a trial is not resumed."""


class Tokens(NamedTuple):
    """`rate` is bytes per token; `apart` is how far apart, relative to it, the rates of two halves of the text are.

    Where a vocabulary was trained: the number of distinct `words` in the `num_bytes` of text, which grows with the text to the
    power `more_words` (Heaps 1978).
    """

    rate: float
    apart: float
    num_bytes: float
    vocab_size: int
    eos_token_id: int
    words: int = 0
    more_words: float = 1.0


class Trial(NamedTuple):
    """Measurements of a sample; arrays have an entry per document.

    `weights` is the number of documents of the input that one represents, `sizes` its bytes, `kept` 1 where it is left after
    all steps, else 0, and `kept_bytes` the bytes left; `range` its index in the sample's ranges. `seconds` of each step, `written` the bytes of
    each kind of file.
    """

    sample: Sample
    range: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    kept_bytes: np.ndarray
    tokens: Tokens | None
    seconds: dict[str, float]
    written: dict[str, int]

    def total(self, values: np.ndarray) -> float:
        """The sum of `values` over the documents of the input."""
        return float((self.weights * values).sum())


def attempt(spec: Settings, identifier: Opened, models: Models, sample: Sample, folder: Path) -> Trial | None:
    """Runs all steps on `sample`; None when it has no document."""
    place, quiet = Scratch(folder), Run(quiet=True)
    seconds: dict[str, float] = {}
    shard = place.state / "documents-00000.parquet"
    with _timed(seconds, "annotate"):
        scorers = opened(spec.scorers, models)
        annotate_items(sample.batches(), shard, identifier=identifier, scorers=scorers)
    seconds["annotate"] -= sample.spent_s
    corpus = Corpus([shard])
    if not len(corpus):
        return None
    where = np.array([sample.place[ident.decode()] for ident in corpus.columns["id"]])
    weights = sample.weights()[where]
    sizes = corpus.columns["bytes"].astype(float)
    tokens = None
    # Earlier artifacts are not compared; of copies outside of the sample nothing is known.
    spec = spec.model_copy(update={"dedups": tuple(technique.alone() for technique in spec.dedups)})
    with Serial().open() as pool:
        chain = Chain(spec, corpus, quiet, pool)
        try:
            with _timed(seconds, "decide"):
                chain.filter(place)
                chain.deduplicate(place)
                chain.edit(place)
                chain.decontaminate(place)
        except NothingLeft:  # true of the sample; the stage raises it if nothing is left of the whole input
            chain.kept[:] = False
        if chain.kept.any():
            tokens = _tokens(spec, corpus, chain.kept, weights, place, pool, seconds)
        with _timed(seconds, "write"):
            write_tables(corpus, {"train": chain.kept}, chain, place, quiet, pool)
    written: dict[str, int] = {}
    with _timed(seconds, "hash"):
        sha256(shard)
        for path in (one for one in place.folder.rglob("*") if one.suffix in (".parquet", ".zst")):
            sha256(path)
            name = path.relative_to(place.folder).parts[0]  # documents, signals, or an export
            written[name] = written.get(name, 0) + path.stat().st_size
    kept = chain.kept.astype(float)
    return Trial(sample, where, weights, sizes, kept, kept * corpus.columns["bytes"], tokens, seconds, written)


def _tokens(
    spec: Settings,
    corpus: Corpus,
    kept: np.ndarray,
    stands_for: np.ndarray,
    place: Scratch,
    pool: Pool,
    seconds: dict[str, float],
) -> Tokens:
    """The rate of the given tokenizer, or of one trained on half of some evenly spaced documents."""
    sizes = corpus.columns["bytes"]
    there = np.flatnonzero(kept)
    few = there[:: max(min(round(sizes[there].sum() / TOKEN_BYTES), len(there) // _LEAST_TEXTS), 1)]
    halves = {"train": few[::2], "val": few[1::2]}
    splits = {name: np.isin(np.arange(len(corpus)), half) for name, half in halves.items()}
    with _timed(seconds, "train"):
        encoder = take_or_train(spec.tokenizer, corpus, splits["train"], place)
    encoder.encode(["première"])  # initializes what text beyond ASCII needs
    with _timed(seconds, "tokenize"):
        tokenize(spec.packing, corpus, splits, encoder, place, Run(quiet=True), pool)
    rates, words = [], [set[str](), set[str]()]
    for number, (name, half) in enumerate(halves.items()):
        if not len(half):  # there is only one document
            continue
        starts = np.load(place.folder / "tokens" / f"{name}.starts.npy")
        count, text = stands_for[half] * (np.diff(starts) - 1), stands_for[half] * sizes[half]
        rates.append(text.sum() / max(count.sum(), 1))
        if spec.tokenizer.path is None:
            for _, shard, first, _ in corpus.spans():
                words[number].update(*(text.split() for _, text in corpus.texts(shard, first, splits[name])))
    seen, unseen = rates[0], rates[-1]
    every = words[0] | words[1]
    return Tokens(
        # A vocabulary fits its training text too well; the rate of one trained on the full corpus lies between the two.
        rate=(seen * unseen) ** 0.5,
        apart=abs(seen / unseen - 1),
        num_bytes=float(sizes[few].sum()),
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        words=len(every),
        more_words=float(np.log2(len(every) / len(words[0]))) if words[0] and len(rates) > 1 else 1.0,
    )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
