"""Trial: a sample goes through the steps of the stage itself, each timed; what is kept of it stands for what is kept of all."""

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
from hone.data.forecasting.duplicates import Copies, left
from hone.data.forecasting.sample import Sample
from hone.data.language import Identifier
from hone.data.settings import Settings
from hone.data.work import Models, opened
from hone.data.write import take_or_train, tokenize, write_tables

TOKEN_BYTES = 2_000_000
"""Text that is tokenized, ..."""
_LEAST_TEXTS = 64
"""... of so many documents at least, if there are."""


class Scratch:
    """Folders that the stage's steps write into, in place of an artifact's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder / "made", folder / "state"
        for path in (folder, self.folder, self.state):
            path.mkdir(exist_ok=True)

    def keep_time(self) -> None:
        """Nothing: a trial is not resumed."""


class Tokens(NamedTuple):
    """`rate` is the bytes a token stands for, `error` its relative standard error; `gap`: what a vocabulary gains on its own text.

    Where a vocabulary was trained: the different `words` among the `num_bytes` of text, which grow with the text to the power
    `more_words` (Heaps 1978).
    """

    rate: float
    num_bytes: float
    error: float
    gap: float
    vocab_size: int
    eos_token_id: int
    words: int = 0
    more_words: float = 1.0


class Trial(NamedTuple):
    """What a sample gave; arrays have an entry a document.

    `weights` is how many documents of the input one stands for, `sizes` its bytes, `kept` the share of it that stays after all
    steps and `kept_bytes` its bytes then; `range` its place in the sample's ranges. `seconds` of each step, `written` the bytes of
    each kind of file.
    """

    sample: Sample
    range: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    kept_bytes: np.ndarray
    copies: Copies | None
    tokens: Tokens | None
    seconds: dict[str, float]
    written: dict[str, int]

    def total(self, values: np.ndarray) -> float:
        """The sum of `values` over the documents of the input."""
        return float((self.weights * values).sum())


def attempt(spec: Settings, identifier: Identifier, models: Models, sample: Sample, folder: Path) -> Trial | None:
    """`sample` through all steps; None where it holds no document."""
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
    copies = tokens = None
    kept = np.zeros(len(corpus))
    with Serial().open() as pool:
        chain = Chain(spec, corpus, quiet, pool)
        try:
            with _timed(seconds, "decide"):
                chain.filter(place)
                kept = chain.alive.astype(float)
                if spec.dedups:
                    there = np.flatnonzero(chain.alive)
                    clusters = _clusters(spec, corpus, chain.alive, place.state)
                    copies = left(clusters[there], where[there], sample.share())
                    kept[there] = copies.weights
                    chain.alive = kept > 0
                chain.edit(place)
                chain.decontaminate(place)
        except NothingLeft:  # of the sample; the stage will say so if it leaves nothing of all
            chain.alive[:] = False
        kept *= chain.alive
        if chain.alive.any():
            tokens = _tokens(spec, corpus, chain.alive, weights * kept, place, pool, seconds)
        with _timed(seconds, "write"):
            write_tables(corpus, {"train": chain.alive}, chain, place, quiet, pool)
    files = {path.parent.name: path for path in place.folder.rglob("*.parquet")}  # documents, signals
    with _timed(seconds, "hash"):
        for path in (shard, *files.values()):
            sha256(path)
    written = {name: path.stat().st_size for name, path in files.items()}
    kept_bytes = kept * corpus.columns["bytes"]
    return Trial(sample, where, weights, sizes, kept, kept_bytes, copies, tokens, seconds, written)


def _clusters(spec: Settings, corpus: Corpus, alive: np.ndarray, state: Path) -> np.ndarray:
    """For each document the one that stands for it after all deduplications."""
    stands = np.arange(len(corpus))
    for number, technique in enumerate(spec.dedups):
        living = alive & (stands == np.arange(len(corpus)))
        own = state / f"dedup-{number}"
        own.mkdir(exist_ok=True)
        stands = technique.representatives(corpus, living, own)[stands]
    return stands


def _tokens(
    spec: Settings,
    corpus: Corpus,
    alive: np.ndarray,
    stands_for: np.ndarray,
    place: Scratch,
    pool: Pool,
    seconds: dict[str, float],
) -> Tokens:
    """The rate of the tokenizer that is taken, or of one trained on half of some documents that are evenly spread."""
    sizes = corpus.columns["bytes"]
    there = np.flatnonzero(alive)
    few = there[:: max(min(round(sizes[there].sum() / TOKEN_BYTES), len(there) // _LEAST_TEXTS), 1)]
    halves = {"train": few[::2], "val": few[1::2]}
    splits = {name: np.isin(np.arange(len(corpus)), half) for name, half in halves.items()}
    with _timed(seconds, "train"):
        encoder = take_or_train(spec.tokenizer, corpus, splits["train"], place)
    encoder.encode(["première"])  # what text beyond ASCII needs is made once
    with _timed(seconds, "tokenize"):
        tokenize(spec.packing, corpus, splits, encoder, place, Run(quiet=True), pool)
    rates, errors, words = [], [], [set[str](), set[str]()]
    for number, (name, half) in enumerate(halves.items()):
        if not len(half):  # one document is all there is
            continue
        starts = np.load(place.folder / "tokens" / f"{name}.starts.npy")
        count, text = stands_for[half] * (np.diff(starts) - 1), stands_for[half] * sizes[half]
        apart = np.diff(count - text * count.sum() / max(text.sum(), 1))
        rates.append(text.sum() / max(count.sum(), 1))
        errors.append((len(half) / max(2 * len(apart), 1) * (apart**2).sum()) ** 0.5 / max(count.sum(), 1))
        if spec.tokenizer.path is None:
            for _, shard, first, _ in corpus.spans():
                words[number].update(*(text.split() for _, text in corpus.texts(shard, first, splits[name])))
    seen, unseen = rates[0], rates[-1]
    every = words[0] | words[1]
    return Tokens(
        # A vocabulary fits what it was trained on too well; that of the full corpus lies between the two.
        rate=(seen * unseen) ** 0.5,
        num_bytes=float(sizes[few].sum()),
        error=float(np.hypot(errors[0], errors[-1]) / 2),
        gap=seen / unseen - 1 if spec.tokenizer.path is None else 0.0,
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
