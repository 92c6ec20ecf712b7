"""Forecast: what the data stage will keep, take and write: a sample of its input goes through the stage's own steps and is scaled up."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.figure import human_bytes
from hone.base.plan import MEMORY, Plan
from hone.base.run import Run
from hone.base.spec import fingerprint
from hone.cost.data.sample import Pace, Trial
from hone.data.annotate import annotate, part_of
from hone.data.chain import Chain, NothingLeft
from hone.data.corpus import BATCH_BYTES, Corpus
from hone.data.executors.serial import Serial
from hone.data.reading import Reading, opened
from hone.data.settings import Settings
from hone.data.tokens.pack import take_or_train, tokenize
from hone.data.work import Work
from hone.data.write import write_tables
from hone.feed.facts import DataFacts, SplitFacts
from hone.feed.files.listing import File, Listing, list_source
from hone.feed.files.streams import open_raw
from hone.model.tokenizer import identity_of
from hone.readers.documents import Batch, Options
from hone.readers.parts import parts
from hone.readers.read import need_packages, read_batches

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


class DataPlan(Plan):
    """A plan with the parts of the time, from which the time of any number of workers follows."""

    pace: Pace | None = None


class SampledPart(NamedTuple):
    """A file, a part or the beginning of one, whose `file.size` bytes stand for `stands_for`; about `most` bytes of its text are used."""

    file: File
    stands_for: float
    most: float = float("inf")


class Scratch(NamedTuple):
    """Folders that the stage's steps write into instead of an artifact's."""

    folder: Path
    state: Path
    log: Path

    def keep_time(self) -> None:
        """Does nothing: a trial is not resumed."""


class _Quiet(Run):
    def warn(self, text: str) -> None:
        """Says nothing: what is true of a sample need not be true of the input."""


def plan(spec: Settings) -> DataPlan:
    """Estimates and facts; only facts when the sample has no document. Raises SpecError when the source cannot be listed.

    The plan is cached per process: a recipe that is planned and then run samples the same files once.
    """
    return _plan(spec, list_source(spec.source, spec.forced).seen)


@functools.lru_cache(maxsize=16)
def _plan(spec: Settings, seen: str) -> DataPlan:
    """`plan` for the files whose `Listing.seen` is `seen`."""
    files, most = list_source(spec.source, spec.forced).files, spec.max_bytes
    need_packages(files)
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
        _attempt(tried, sample(files, spec.options, Path(name), SAMPLE_BYTES / 8, most), Path(name) / "first")
        started_s = time.perf_counter() - begun
        sampled = sample(files, spec.options, Path(name), SAMPLE_BYTES, most)
        whole = all(one.file.size == one.stands_for for one in sampled)
        trial = _attempt(tried, sampled, Path(name) / "second", most if whole else None)
    if trial is None:
        return DataPlan(facts=_facts(spec, None))
    if most is not None and not whole:
        total = sum(file.size for file in files)
        trial.weight *= min(most / float(trial.weight @ trial.size), total / min(total, most))
    num_bytes = human_bytes(sum(one.file.size for one in sampled))
    where = f"{num_bytes} at {len(sampled)} places"
    if whole:
        where = f"all {num_bytes}{' up to max_bytes' if most is not None else ''}"
    estimates, pace = trial.estimates(
        f"sample of {where}",
        stands_for=None if whole else np.array([one.stands_for for one in sampled]),
        missing=_missing(spec, sampled, whole),
        train_share=1 - spec.validation_fraction,
        max_train_bytes=0 if spec.tokenizer.path else spec.tokenizer.max_train_bytes,
        batch_bytes=BATCH_BYTES,
        held_bytes=sum(one.memory_bytes(float(trial.weight.sum())) for one in spec.dedups),  # type: ignore[attr-defined]
        started_s=started_s,
    )
    for technique in spec.annotations:
        for name, one in technique.estimates(trial.size, trial.weight * (trial.left > 0)).items():  # type: ignore[attr-defined]
            old = estimates.get(name)
            both = {"value": old.value + one.value, "formula": f"{old.formula} + {one.formula}"} if old else {}
            estimates[name] = one.model_copy(update=both)
    ways = {MEMORY: ("run with --executor=processes", "lower tokenizer.max_train_bytes", "set max_bytes")}
    return DataPlan(estimates=estimates, facts=_facts(spec, trial), ways=ways, pace=pace)


def sample(
    files: Sequence[File], options: Options, folder: Path, num_bytes: float, max_bytes: int | None = None
) -> list[SampledPart]:
    """Parts at even distances along the bytes of `files`, about `num_bytes` together: all parts of a sorted source are there (Madow 1949).

    With `max_bytes` they are of so many bytes of input. Beginnings of files that cannot be cut are copied to `folder`.
    """
    sizes = np.array([file.size for file in files], float)
    total = float(sizes.sum())
    num_bytes *= total / max(sum(file.size * (_LIBRARY_COST if file.format == "python" else 1) for file in files), 1)
    if total <= num_bytes:
        return [SampledPart(file, file.size) for file in files]
    reach = min(total, max_bytes or total)
    place_bytes = max(int(min(num_bytes, reach) / PLACES), 1)
    # Of small files, which are read whole, more places.
    count = round(PLACES * place_bytes / (np.minimum(sizes, place_bytes) @ sizes / total))
    step, ends = reach / count, np.cumsum(sizes)
    places = (np.arange(count) + 0.5) * step
    found = []
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
            found.append(SampledPart(cut[at], times * step, times * place_bytes))
    return found


def _attempt(
    spec: Settings, sampled: Sequence[SampledPart], folder: Path, max_bytes: int | None = None
) -> Trial | None:
    """Runs all steps on the first `max_bytes` of the text of `sampled`, each timed; None when they have no document."""
    place, of, weights = Scratch(folder / "made", folder / "state", folder), {}, np.zeros(len(sampled))
    for path in (place.folder, place.state):
        path.mkdir(parents=True)
    begun = time.perf_counter()
    with Serial().open() as pool:
        work = Work(place, _Quiet(quiet=True), pool)
    models, _ = Reading(spec, Listing(), work).train(folder / "scorers")
    scorers, identifier = opened(spec.scorers, models), spec.identifier.open(spec.languages)  # type: ignore[arg-type, attr-defined]
    shard, items = place.state / "documents.parquet", _items(sampled, spec.options, of, weights)
    annotate(items, shard, identifier=identifier, scorers=scorers, max_bytes=max_bytes)
    corpus, read = Corpus([shard]), time.perf_counter()
    if not len(corpus):
        return None
    part = np.array([of[ident.decode()] for ident in corpus.columns["id"]])
    size = corpus.columns["bytes"].astype(float)
    chain = Chain(spec, corpus, work)
    try:
        for step in (chain.filter, chain.deduplicate, chain.edit, chain.decontaminate):
            step()
    except NothingLeft:  # true of the sample; the stage raises it if nothing is left of the whole input
        chain.kept[:] = False
    write_tables({"train": chain.kept}, chain, work)
    seconds = {"read": read - begun, "filter to write": time.perf_counter() - read, "train": 0.0, "tokenize": 0.0}
    trial = Trial(part, weights[part], size, chain.kept * corpus.columns["bytes"].astype(float), seconds)
    if chain.kept.any():
        _count_tokens(spec, corpus, chain.kept, work, trial)
    tables = [path for path in place.folder.rglob("*") if path.suffix in (".parquet", ".zst")]
    trial.written = sum(path.stat().st_size for path in tables)
    return trial


def _items(sampled: Sequence[SampledPart], options: Options, of: dict[str, int], weights: np.ndarray) -> Iterator[Any]:
    """What readers give for `sampled`; notes the part of each document in `of`, and for how many documents one of each part stands."""
    for number, one in enumerate(sampled):
        there = used = 0
        weights[number] = one.stands_for / max(one.file.size, 1)
        for item in read_batches(one.file, options):
            if isinstance(item, Batch):
                there += item.texts.num_bytes
                starts = item.texts.offsets[:-1] - item.texts.offsets[0] + used
                item = part_of(item, slice(0, int(np.searchsorted(starts, one.most))))
                used += item.texts.num_bytes
                of.update(dict.fromkeys(item.ids, number))
            yield item
        weights[number] *= there / max(used, 1)


def _count_tokens(spec: Settings, corpus: Corpus, kept: np.ndarray, work: Work, trial: Trial) -> None:
    """Tokenizes some of the kept documents with the given tokenizer, or with one trained on half of them, and notes it in `trial`."""
    there = np.flatnonzero(kept)
    few = there[:: max(min(round(trial.left.sum() / TOKEN_BYTES), len(there) // 64), 1)]
    halves = {"train": few[::2], "val": few[1::2]}
    splits = {name: np.isin(np.arange(len(corpus)), half) for name, half in halves.items()}
    begun = time.perf_counter()
    encoder = take_or_train(spec.tokenizer, corpus, splits["train"], work)
    trained = time.perf_counter()
    rows = tokenize(spec.packing, corpus, splits, encoder, work)
    trial.seconds |= {"train": trained - begun, "tokenize": time.perf_counter() - trained}
    # A vocabulary fits its training text too well; the rate of one trained on the full corpus lies between the two.
    rates = [row["bytes"] / max(row["tokens"] - row["documents"], 1) for row in rows.values() if row["documents"]]
    trial.rate, trial.token_bytes = float(np.prod(rates) ** (1 / len(rates))), float(trial.left[few].sum())
    trial.vocab_size, trial.eos_token_id = encoder.vocab_size, encoder.eos_token_id
    if spec.tokenizer.path is None and len(few) > 1:
        texts = {name: corpus.texts(corpus.shards[0], 0, half) for name, half in splits.items()}
        first, second = ({word for _, text in half for word in text.split()} for half in texts.values())
        trial.words, trial.growth = len(first | second), len(first | second) / max(len(first), 1)


def _missing(spec: Settings, sampled: Sequence[SampledPart], whole: bool) -> list[str]:
    """Why the estimates are bounds: what the sample's run leaves out, or a sample cannot show."""
    found = [f"without {one.kind} and the filters that use it" for one in spec.scorers if one.kind in _SLOW_SCORERS]
    found += ["without what language models are asked and the waiting for them"] * bool(spec.annotations)
    found += ["without the copies that embeddings show"] * any(getattr(one, "model", "") for one in spec.dedups)
    found += ["without what the chat template adds to conversations"] * (spec.tokenizer.chat is not None)
    found += ["without comparing earlier artifacts"] * any(getattr(one, "against", ()) for one in spec.dedups)
    if not whole:
        found += ["of copies and edits only what the sample repeats"] * bool(spec.dedups or spec.edits)
        beginnings = any(one.file.path.name.startswith("beginning-") for one in sampled)
        found += ["the beginning of large files stands for the rest"] * beginnings
    return found


def _facts(spec: Settings, trial: Trial | None) -> DataFacts:
    """Facts of the output."""
    given = spec.tokenizer.path
    counts = {"tokens": trial.tokens, "documents": trial.documents, "bytes": trial.kept} if trial else {}
    shares = {"train": 1 - spec.validation_fraction, "val": spec.validation_fraction}
    return DataFacts(
        where=f"the data stage of {spec.source}",
        splits={
            name: SplitFacts(**{key: round(share * counts.get(key, 0.0)) for key in ("tokens", "documents", "bytes")})
            for name, share in shares.items()
        },
        vocab_size=(trial and given and trial.vocab_size) or spec.tokenizer.vocab_size,
        eos_token_id=trial.eos_token_id if trial else None,
        tokenizer=identity_of(Path(given).expanduser())
        if given
        else f"trained on {fingerprint(spec.model_dump(mode='json'))}",
        packing=spec.packing.kind,
        targets="all" if spec.tokenizer.chat is None else spec.tokenizer.chat.targets,
        exact=False,
    )
