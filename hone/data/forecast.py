"""Forecast: what the data stage will keep, take and write, from a sample of its input that goes through the stage's own steps."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.figure import Estimate, human_bytes
from hone.base.plan import MEMORY, Plan
from hone.base.run import Run
from hone.base.spec import fingerprint
from hone.cost.data import TRAIN_POWER, Pace, data_disk, data_memory
from hone.data.annotate import annotate_items, part_of
from hone.data.chain import Chain, NothingLeft
from hone.data.corpus import BATCH_BYTES, Corpus
from hone.data.executors.base import Pool
from hone.data.executors.serial import Serial
from hone.data.settings import Settings
from hone.data.work import opened, train_scorers
from hone.data.write import take_or_train, tokenize, write_tables
from hone.feed.facts import DataFacts, SplitFacts
from hone.feed.files.listing import File, list_source
from hone.feed.files.streams import open_raw
from hone.model.tokenizer import identity_of
from hone.readers.documents import Batch, Options
from hone.readers.parts import parts
from hone.readers.read import read_batches

SAMPLE_BYTES = 16 << 20
"""Input of a sample; smaller inputs are sampled whole."""
PLACES = 64
"""Least places of a sample, at which equal parts of it are read; of a small file, and of one that cannot be cut, all of it is."""
TOKEN_BYTES = 2_000_000
"""Text of the sample that is tokenized."""
_LIBRARY_COST = 8
"""Extracting the documentation of a library's module takes so many times as long as measuring its text."""
_STREAMS = ("text", "code", "jsonl", "json", "csv", "warc", "tar", "xml", "mbox")
"""Formats of which the beginning can be read."""
_SLOW_SCORERS = ("neural", "cascade", "function")
"""A plan neither trains nor asks these: it leaves out the filters that use them."""
_MARGIN_BYTES = 1 << 16
"""Statistics, samples and settings in the finished folder."""


class DataPlan(Plan):
    """A plan with the parts of the time, from which the time of any number of workers follows."""

    pace: Pace | None = None


class SampledPart(NamedTuple):
    """A file, a part or the beginning of one, whose `file.size` bytes stand for `stands_for`; about `most` bytes of its text are used."""

    file: File
    stands_for: float
    most: float = float("inf")


@dataclass
class Trial:
    """What the steps made of a sample. Arrays have an entry per document: its piece, how many documents of the input it stands for, its bytes
    and those left after all steps, 0 for a dropped one. Of `token_bytes` bytes of text that were tokenized, `rate` is the bytes of a token, `words`
    the distinct words, whose number grows as the power `growth` of the text (Heaps 1978). `written`: bytes of the tables.
    """

    piece: np.ndarray
    weight: np.ndarray
    size: np.ndarray
    left: np.ndarray
    seconds: Counter[str] = field(default_factory=Counter)
    written: int = 0
    token_bytes: float = 0.0
    rate: float = 1.0
    words: int = 0
    growth: float = 1.0
    vocab_size: int = 0
    eos_token_id: int | None = None


def plan(spec: Settings) -> DataPlan:
    """Estimates and facts; only facts when the sample has no document. Raises SpecError when the source cannot be listed.

    The plan is cached per process: a recipe that is planned and then run samples the same files once.
    """
    return _plan(spec, list_source(spec.source, spec.forced).seen)


@functools.lru_cache(maxsize=16)
def _plan(spec: Settings, seen: str) -> DataPlan:
    """`plan` for the files whose `Listing.seen` is `seen`."""
    files = list_source(spec.source, spec.forced).files
    slow = {column for scorer in spec.scorers if scorer.kind in _SLOW_SCORERS for column in scorer.columns}  # type: ignore[attr-defined]
    tried = spec.model_copy(
        update={
            "scorers": tuple(one for one in spec.scorers if one.kind not in _SLOW_SCORERS),
            "filters": tuple(one for one in spec.filters if not one.columns & slow),  # type: ignore[attr-defined]
            "dedups": tuple(one.alone() for one in spec.dedups if not getattr(one, "model", "")),  # type: ignore[attr-defined]
        }
    )
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        # The first, small sample loads and compiles code, so that this time is not counted in the rates.
        _attempt(tried, sample(files, spec.options, Path(name), SAMPLE_BYTES / 8, spec.max_bytes), Path(name) / "first")
        started_s = time.perf_counter() - begun
        pieces = sample(files, spec.options, Path(name), SAMPLE_BYTES, spec.max_bytes)
        whole = _is_whole(pieces)
        trial = _attempt(tried, pieces, Path(name) / "second", spec.max_bytes if whole else None)
    if trial is None:
        return DataPlan(facts=_facts(spec, None, 0.0, 0.0))
    if spec.max_bytes is not None and not whole:
        total = sum(file.size for file in files)
        trial.weight *= min(spec.max_bytes / float(trial.weight @ trial.size), total / min(total, spec.max_bytes))
    return _scaled(spec, trial, pieces, started_s)


def sample(
    files: Sequence[File], options: Options, folder: Path, num_bytes: float, max_bytes: int | None = None
) -> list[SampledPart]:
    """Pieces at even distances along the bytes of `files`, about `num_bytes` together: all parts of a sorted source are there (Madow 1949).

    With `max_bytes` they are of so many bytes of input. Beginnings of files that cannot be cut are copied to `folder`.
    """
    sizes = np.array([file.size for file in files], float)
    total = float(sizes.sum())
    num_bytes *= total / max(sum(file.size * (_LIBRARY_COST if file.format == "python" else 1) for file in files), 1)
    if total <= num_bytes:
        return [SampledPart(file, file.size) for file in files]
    reach = min(total, max_bytes or total)
    place_bytes = max(int(min(num_bytes, reach) / PLACES), 1)
    count = round(
        PLACES * place_bytes / (np.minimum(sizes, place_bytes) @ sizes / total)
    )  # of small files, more places
    step, ends = reach / count, np.cumsum(sizes)
    places = (np.arange(count) + 0.5) * step
    pieces = []
    for number, times in Counter(np.searchsorted(ends, places, "right").tolist()).items():
        file, before = files[number], ends[number] - sizes[number]
        most = times * place_bytes // (4 if file.compression else 1)
        cut = parts(file, options, place_bytes)
        if len(cut) == 1 and file.size > 2 * most and file.format in _STREAMS:
            path = folder / f"beginning-{num_bytes:.0f}-{number}"
            with open_raw(file) as raw:
                path.write_bytes(raw.read(most))
            cut = [replace(file, path=path, url="", size=most)]
        borders = before + np.cumsum([part.size for part in cut])[:-1]
        here = places[slice(*np.searchsorted(places, (before, ends[number])))]
        for at, times in Counter(np.searchsorted(borders, here, "right").tolist()).items():
            pieces.append(SampledPart(cut[at], times * step, times * place_bytes))
    return pieces


def _is_whole(pieces: Sequence[SampledPart]) -> bool:
    """Whether `pieces` are all of the input, and no sample of it."""
    return all(piece.file.size == piece.stands_for for piece in pieces)


class _Quiet(Run):
    def warn(self, text: str) -> None:
        """Says nothing: what is true of a sample need not be true of the input."""


class Scratch:
    """Folders that the stage's steps write into instead of an artifact's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder / "made", folder / "state"
        for path in (self.folder, self.state):
            path.mkdir(parents=True)

    def keep_time(self) -> None:
        """Does nothing: a trial is not resumed."""


def _attempt(spec: Settings, pieces: Sequence[SampledPart], folder: Path, max_bytes: int | None = None) -> Trial | None:
    """Runs all steps on the first `max_bytes` of the text of `pieces`, each timed; None when they have no document."""
    place, quiet, clock = Scratch(folder), _Quiet(quiet=True), [time.perf_counter()]
    of: dict[str, int] = {}
    weights = np.zeros(len(pieces))
    models, _ = train_scorers(spec, folder / "scorers", quiet)
    scorers, shard = opened(spec.scorers, models), place.state / "documents.parquet"  # type: ignore[arg-type]
    identifier = spec.identifier.open(spec.languages)  # type: ignore[attr-defined]
    items = _items(pieces, spec.options, of, weights)
    annotate_items(items, shard, identifier=identifier, scorers=scorers, max_bytes=max_bytes)
    clock.append(time.perf_counter())
    corpus = Corpus([shard])
    if not len(corpus):
        return None
    piece = np.array([of[ident.decode()] for ident in corpus.columns["id"]])
    size = corpus.columns["bytes"].astype(float)
    with Serial().open() as pool:
        chain = Chain(spec, corpus, quiet, pool)
        try:
            for step in (chain.filter, chain.deduplicate, chain.edit, chain.decontaminate):
                step(place)  # type: ignore[arg-type]
        except NothingLeft:  # true of the sample; the stage raises it if nothing is left of the whole input
            chain.kept[:] = False
        trial = Trial(piece, weights[piece], size, chain.kept * corpus.columns["bytes"].astype(float))
        write_tables(corpus, {"train": chain.kept}, chain, place, quiet, pool)
        clock.append(time.perf_counter())
        if chain.kept.any():
            _count_tokens(spec, corpus, chain.kept, place, pool, trial)
    trial.seconds |= {"read": clock[1] - clock[0], "filter to write": clock[2] - clock[1]}
    tables = [path for path in place.folder.rglob("*") if path.suffix in (".parquet", ".zst")]
    trial.written = sum(path.stat().st_size for path in tables)
    return trial


def _items(pieces: Sequence[SampledPart], options: Options, of: dict[str, int], weights: np.ndarray) -> Iterator[Any]:
    """What readers give for `pieces`; notes the piece of each document in `of`, and for how many documents one of each piece stands."""
    for number, piece in enumerate(pieces):
        there = used = 0
        weights[number] = piece.stands_for / max(piece.file.size, 1)
        for item in read_batches(piece.file, options):
            if isinstance(item, Batch):
                there += item.texts.num_bytes
                starts = item.texts.offsets[:-1] - item.texts.offsets[0] + used
                item = part_of(item, slice(0, int(np.searchsorted(starts, piece.most))))
                used += item.texts.num_bytes
                of.update(dict.fromkeys(item.ids, number))
            yield item
        weights[number] *= there / max(used, 1)


def _count_tokens(spec: Settings, corpus: Corpus, kept: np.ndarray, place: Scratch, pool: Pool, trial: Trial) -> None:
    """Tokenizes some of the kept documents with the given tokenizer, or with one trained on half of them, and notes it in `trial`."""
    there = np.flatnonzero(kept)
    few = there[:: max(min(round(trial.left.sum() / TOKEN_BYTES), len(there) // 64), 1)]
    halves = {"train": few[::2], "val": few[1::2]}
    splits = {name: np.isin(np.arange(len(corpus)), half) for name, half in halves.items()}
    begun = time.perf_counter()
    encoder = take_or_train(spec.tokenizer, corpus, splits["train"], place)
    trained = time.perf_counter()
    rows = tokenize(spec.packing, corpus, splits, encoder, place, _Quiet(quiet=True), pool)
    trial.seconds |= {"train": trained - begun, "tokenize": time.perf_counter() - trained}
    # A vocabulary fits its training text too well; the rate of one trained on the full corpus lies between the two.
    rates = [row["bytes"] / max(row["tokens"] - row["documents"], 1) for row in rows.values() if row["documents"]]
    trial.rate, trial.token_bytes = float(np.prod(rates) ** (1 / len(rates))), float(trial.left[few].sum())
    trial.vocab_size, trial.eos_token_id = encoder.vocab_size, encoder.eos_token_id
    if spec.tokenizer.path is None and len(few) > 1:
        (shard,) = corpus.shards
        words = [
            {word for _, text in corpus.texts(shard, 0, half) for word in text.split()} for half in splits.values()
        ]
        trial.words = len(words[0] | words[1])
        trial.growth = float(np.log2(trial.words / len(words[0])))


def _scaled(spec: Settings, trial: Trial, pieces: Sequence[SampledPart], started_s: float) -> DataPlan:
    """The plan of the whole input."""
    whole = _is_whole(pieces)
    text, documents = float(trial.weight @ trial.size), float(trial.weight.sum())
    kept, num_kept = float(trial.weight @ trial.left), float(trial.weight @ (trial.left > 0))
    tokens, train = kept / trial.rate + num_kept, 1 - spec.validation_fraction
    grown, of_tokens = text / trial.size.sum(), kept / max(trial.token_bytes, 1.0)
    trained = min(kept * train, spec.tokenizer.max_train_bytes) if spec.tokenizer.path is None else 0.0
    error = 0.0 if whole else _error(trial, pieces)
    missing = _missing(spec, pieces, whole)
    sampled = human_bytes(sum(piece.file.size for piece in pieces))
    of_all = f"sample of all {sampled}{' up to max_bytes' if spec.max_bytes is not None else ''}"
    said = "; ".join([of_all if whole else f"sample of {sampled} at {len(pieces)} places", *missing])

    def estimate(value: float, unit: str, formula: str, error: float) -> Estimate:
        tolerance = None if missing or (trial.left > 0).sum() < 10 else max(3 * error, 0.01)
        formula = f"{formula}; {said}; standard error {100 * error:.1f} %"
        return Estimate(value=value, unit=unit, formula=formula, bound=bool(missing), tolerance=tolerance)

    seconds = {name: trial.seconds[name] * grown for name in ("read", "filter to write")}
    seconds["tokenize"] = trial.seconds["tokenize"] * of_tokens
    train_s = trial.seconds["train"] * (2 * trained / max(trial.token_bytes, 1.0)) ** TRAIN_POWER
    rates = f"{said}; seconds at its rates: {', '.join(f'{name} {one:.2f}' for name, one in seconds.items())}, training BPE {train_s:.2f}"
    pace = Pace(sum(seconds.values()), train_s, started_s, rates, any("without" in one for one in missing))
    words = trial.words * max(trained / max(trial.token_bytes, 1.0), 1.0) ** trial.growth if trained else 0.0
    memory = data_memory(batch_bytes=min(text, BATCH_BYTES), documents=documents, words=words, shared=False)
    held = sum(one.memory_bytes(documents) for one in spec.dedups)  # type: ignore[attr-defined]
    more = f" + {held:.3g} B of embeddings, held twice" if held else ""
    memory = memory.model_copy(update={"value": memory.value + held, "formula": memory.formula + more})
    disk = {
        "times the sample's tables": (grown, trial.written),
        "tokens": (tokens, 2 if trial.vocab_size <= 1 << 16 else 4),
        "tokenizer entries": (trial.vocab_size, 40),
        "files beside them": (1.0, _MARGIN_BYTES),
    }
    estimates = {
        "time_s": pace.estimate(1),
        MEMORY: memory,
        "disk_bytes": data_disk(disk),
        "kept_bytes": estimate(kept, "B", f"text bytes x share kept ({kept / max(text, 1):.3f})", error),
    }
    if trial.token_bytes:
        # Documents are held out by hash, so the text left to train on varies; so do the bytes of a token, by a percent or so.
        drawn = (1 - train) / train * float(trial.weight @ trial.left**2) / max(kept, 1) ** 2
        formula = f"(kept bytes / {trial.rate:.2f} bytes a token + an end a document) x train share"
        error = (error**2 + drawn + 0.01**2) ** 0.5
        estimates["train_tokens"] = estimate(train * tokens, "tokens", formula, error)
    for technique in spec.annotations:
        asked = technique.estimates(trial.size, trial.weight * (trial.left > 0))  # type: ignore[attr-defined]
        for name, one in asked.items():
            old = estimates.get(name)
            both = {"value": old.value + one.value, "formula": f"{old.formula} + {one.formula}"} if old else {}
            estimates[name] = one.model_copy(update=both)
    ways = {MEMORY: ("run with --executor=processes", "lower tokenizer.max_train_bytes", "set max_bytes")}
    return DataPlan(estimates=estimates, facts=_facts(spec, trial, kept, num_kept), ways=ways, pace=pace)


def _missing(spec: Settings, pieces: Sequence[SampledPart], whole: bool) -> list[str]:
    """Why the estimates are bounds: what the sample's run leaves out, or a sample cannot show."""
    found = [f"without {one.kind} and the filters that use it" for one in spec.scorers if one.kind in _SLOW_SCORERS]
    found += ["without what language models are asked and the waiting for them"] * bool(spec.annotations)
    found += ["without the copies that embeddings show"] * any(getattr(one, "model", "") for one in spec.dedups)
    found += ["without comparing earlier artifacts"] * any(getattr(one, "against", ()) for one in spec.dedups)
    if not whole:
        found += ["of copies and edits only what the sample repeats"] * bool(spec.dedups or spec.edits)
        beginnings = any(piece.file.path.name.startswith("beginning-") for piece in pieces)
        found += ["the beginning of large files stands for the rest"] * beginnings
    return found


def _error(trial: Trial, pieces: Sequence[SampledPart]) -> float:
    """Relative standard error of the kept bytes: how the pieces differ in what is left of the input that they stand for."""
    stands = np.array([piece.stands_for for piece in pieces])
    left = np.bincount(trial.piece, trial.weight * trial.left, len(pieces))
    if len(pieces) < 2 or not left.sum():
        return 1.0
    apart = left - stands * left.sum() / stands.sum()
    return float((len(pieces) / (len(pieces) - 1) * (apart**2).sum()) ** 0.5 / left.sum())


def _facts(spec: Settings, trial: Trial | None, kept: float, documents: float) -> DataFacts:
    """Facts of the output: `kept` bytes in `documents` documents."""
    path = spec.tokenizer.path
    tokens = kept / trial.rate + documents if trial else 0.0
    shares = {"train": 1 - spec.validation_fraction, "val": spec.validation_fraction}
    counts = {"tokens": tokens, "documents": documents, "bytes": kept}
    return DataFacts(
        where=f"the data stage of {spec.source}",
        splits={
            split: SplitFacts(**{name: round(share * one) for name, one in counts.items()})
            for split, share in shares.items()
        },
        vocab_size=trial.vocab_size if trial and trial.vocab_size and path else spec.tokenizer.vocab_size,
        eos_token_id=trial.eos_token_id if trial else None,
        tokenizer=identity_of(Path(path).expanduser())
        if path
        else f"trained on {fingerprint(spec.model_dump(mode='json'))}",
        packing=spec.packing.kind,
        exact=False,
    )
