"""Plan of the data stage: time, memory, disk and output, estimated from a sample of its input that goes through every step."""

from __future__ import annotations

import codecs
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hone.base.errors import SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.plan import MEMORY, Plan
from hone.base.run import Run
from hone.base.spec import fingerprint
from hone.cost.data import TRAIN_POWER, Pace, data_disk, data_memory
from hone.data.corpus import BATCH_BYTES, need_parquet
from hone.data.forecasting.sample import Sample, Sort, Unit, units_of
from hone.data.forecasting.trial import Tokens, Trial, attempt
from hone.data.settings import Settings
from hone.data.work import Models, train_scorers
from hone.feed.facts import DataFacts, SplitFacts
from hone.feed.files.listing import list_source
from hone.model.tokenizer import identity_of

SAMPLE_BYTES = (16 << 20, 64 << 20)
"""Least and most text of a sample; smaller inputs are sampled whole."""
_SAMPLE_SHARE = 0.01
_SLOW_SCORER_BYTES = 600_000
_REMOTE_BYTES = 2 << 20
_LIBRARY_COST = 8
"""Extracting the documentation of a library's module takes so many times as long as measuring its text."""
_TRAINED_LONG = ("neural", "cascade")
"""Scorers whose training takes minutes: not trained for a plan, which then leaves out the filters that use them."""
_READ_SLOWLY = (*_TRAINED_LONG, "function")
_SIGMAS = 3.0
_LEAST_TOLERANCE = 0.01
_LEAST_DOCUMENTS = 10
_MARGIN_BYTES = 1 << 16
"""Statistics, samples and settings in the finished folder."""
_WAYS = {
    MEMORY: ("run with --executor=processes", "lower tokenizer.max_train_bytes", "set max_bytes"),
}


class DataPlan(Plan):
    """A plan with the parts of the time, from which the time of any number of workers follows.

    `left_out` are scorers that a plan does not train: the stage plans again when it has trained them.
    """

    pace: Pace | None = None
    left_out: tuple[str, ...] = ()


def plan(spec: Settings, models: Models | None = None, trained_s: float = 0.0) -> DataPlan:
    """Estimates and facts; only facts when the sample has no document. Raises SpecError when the source cannot be listed.

    `models` are the trained scorers, if already trained, which took `trained_s` seconds. The plan is cached per process: a
    recipe that is planned and then run samples the same files once.
    """
    need_parquet()
    _check_encoding(spec.encoding)
    return _plan(spec, list_source(spec.source, spec.forced).seen, models, trained_s)


@functools.lru_cache(maxsize=16)
def _plan(spec: Settings, seen: str, models: Models | None, trained_s: float) -> DataPlan:
    """`plan` for the files whose `Listing.seen` is `seen`."""
    begun = time.perf_counter()
    listing = list_source(spec.source, spec.forced)
    listed_s = time.perf_counter() - begun
    left_out = [scorer for scorer in spec.scorers if scorer.kind in _TRAINED_LONG and models is None]
    unknown = {column for scorer in left_out for column in scorer.columns}
    tried = spec.model_copy(
        update={
            "scorers": tuple(scorer for scorer in spec.scorers if scorer not in left_out),
            "filters": tuple(one for one in spec.filters if not one.columns & unknown),
        }
    )
    identifier = spec.identifier.open(spec.languages)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if models is None:
            begun = time.perf_counter()
            models, _ = train_scorers(tried, folder / "scorers", Run(quiet=True))
            trained_s = time.perf_counter() - begun
        units = units_of(listing.files)

        def tried_out(label: str, num_bytes: float) -> Trial | None:
            (folder / label).mkdir()
            sample = Sample(units, num_bytes, spec.options, folder / label)
            return attempt(tried, identifier, models, sample, folder / f"{label}-run")

        # The first, small sample also loads and compiles code, so that this time is not counted in the rates.
        begun = time.perf_counter()
        first = tried_out("first", sample_bytes(tried, units) // 8)
        started_s = time.perf_counter() - begun
        if first is not None and spec.max_bytes is not None and first.total(first.sizes) > spec.max_bytes:
            units = up_to(spec.max_bytes, units, first)
        trial = tried_out("sample", sample_bytes(tried, units))
    if trial is None:
        return DataPlan(facts=_facts(spec, None), ways=_WAYS)
    missing = f"without filters by {' and '.join(one.kind for one in left_out)}" if left_out else ""
    if spec.annotations:  # a plan asks nobody: it would cost money
        missing = "; ".join(filter(None, [missing, "without what language models are asked and the waiting for them"]))
    scale = min(spec.max_bytes / trial.total(trial.sizes), 1.0) if spec.max_bytes is not None else 1.0
    pace = _pace(spec, trial, scale, listed_s + trained_s, started_s, missing)
    estimates = {
        "time_s": pace.estimate(1),
        MEMORY: _memory(spec, trial, scale),
        "disk_bytes": _disk(trial, scale),
        **_yields(spec, trial, scale, missing),
        **_asked(spec, trial, scale),
    }
    names = tuple(scorer.kind for scorer in left_out)
    return DataPlan(estimates=estimates, facts=_facts(spec, trial, scale), ways=_WAYS, pace=pace, left_out=names)


def _check_encoding(name: str) -> None:
    if name == "auto":
        return
    try:
        codecs.lookup(name)
    except LookupError:
        raise SpecError(
            f"encoding = '{name}': not an encoding of Python", fix="for example utf-8, latin-1, or auto"
        ) from None


def sample_bytes(spec: Settings, units: Sequence[Unit]) -> float:
    """Bytes of input in a sample, so that it takes a second or two, or a few percent of the run."""
    if any(unit.file.url for unit in units):
        return _REMOTE_BYTES
    embeds = any(getattr(technique, "model", "") for technique in spec.dedups)
    if embeds or any(scorer.kind in _READ_SLOWLY for scorer in spec.scorers):
        return _SLOW_SCORER_BYTES
    least, most = SAMPLE_BYTES
    total = sum(unit.content for unit in units)
    cost = sum(unit.content * (_LIBRARY_COST if unit.file.format == "python" else 1) for unit in units)
    return min(max(_SAMPLE_SHARE * total, least), most) * total / max(cost, 1)


def up_to(num_bytes: float, units: Sequence[Unit], seen: Trial) -> list[Unit]:
    """The first of `units` that have `num_bytes` of text together, at the text per byte of their sort in `seen`."""
    text: Counter[Sort] = Counter()
    for number, found in zip(seen.range.tolist(), (seen.weights * seen.sizes).tolist()):
        text[seen.sample.ranges[number].sort] += found
    chosen: list[Unit] = []
    for unit in units:
        holds = unit.content * text[unit.sort] / sum(one.content for one in seen.sample.sorts[unit.sort])
        if holds > num_bytes:
            unit = unit._replace(content=unit.content * num_bytes / holds, most_text=num_bytes)
        chosen.append(unit)
        num_bytes -= holds
        if num_bytes <= 0:
            break
    return chosen


def _facts(spec: Settings, trial: Trial | None, scale: float = 1.0) -> DataFacts:
    """Facts of the output; estimates without a tokenizer's counts."""
    where = f"the data stage of {spec.source}"
    taken = spec.tokenizer.path
    tokens = trial.tokens if trial is not None else None
    kept, documents = (trial.total(trial.kept_bytes) * scale, trial.total(trial.kept) * scale) if trial else (0.0, 0.0)
    shares = {"train": 1 - spec.validation_fraction, "val": spec.validation_fraction}
    return DataFacts(
        where=where,
        splits={
            name: SplitFacts(
                tokens=round(share * (kept / tokens.rate + documents)) if tokens else 0,
                documents=round(share * documents),
                bytes=round(share * kept),
            )
            for name, share in shares.items()
        },
        vocab_size=tokens.vocab_size if tokens and taken else spec.tokenizer.vocab_size,
        eos_token_id=tokens.eos_token_id if tokens else None,
        tokenizer=identity_of(Path(taken).expanduser())
        if taken
        else f"trained on {fingerprint(spec.model_dump(mode='json'))}",
        packing=spec.packing.kind,
        exact=False,
    )


def _yields(spec: Settings, trial: Trial, scale: float, missing: str) -> dict[str, Estimate]:
    """Output bytes and tokens. Upper bounds where a sample cannot show what a step removes."""
    kept, text = trial.total(trial.kept_bytes) * scale, trial.total(trial.sizes) * scale
    error = _error(trial)
    sample = trial.sample
    known_before = any(getattr(technique, "against", ()) for technique in spec.dedups)
    repeats = not sample.whole and bool(spec.dedups or spec.edits)
    bound = bool(missing) or known_before or sample.beginnings or repeats
    open_ended = bound or trial.kept.sum() < _LEAST_DOCUMENTS
    said = [_said(sample), f"standard error {100 * error:.1f} %", missing]
    said += ["without comparing earlier artifacts"] * known_before
    if not sample.whole:
        said += ["of copies and edits only what the sample repeats"] * repeats
        said += ["the beginning of large files stands for the rest"] * sample.beginnings
    share = f"share kept ({kept / max(text, 1):.3f}, {'; '.join(filter(None, said))})"

    def estimate(value: float, unit: str, formula: str, error: float) -> Estimate:
        tolerance = None if open_ended else max(_SIGMAS * error, _LEAST_TOLERANCE)
        return Estimate(value=value, unit=unit, formula=formula, bound=bound, tolerance=tolerance)

    made = {"kept_bytes": estimate(kept, "B", f"text bytes x {share}", error)}
    tokens = trial.tokens
    if tokens is not None:
        train = 1 - spec.validation_fraction
        # Documents are assigned to validation by hash, so its bytes vary by this much.
        drawn = (1 - train) / train * trial.total(trial.kept_bytes**2)
        drawn /= max(trial.total(trial.kept_bytes), 1) ** 2 * scale
        token_error = (error**2 + drawn + (tokens.apart / 4) ** 2) ** 0.5
        halves = f": the mean of two halves of the sample, {100 * tokens.apart:.1f} % apart"
        formula = (
            f"(text bytes x {share} / bytes a token ({tokens.rate:.2f}{halves}) + an end a document) x train share; "
        )
        value = train * (kept / tokens.rate + trial.total(trial.kept) * scale)
        made["train_tokens"] = estimate(
            value, "tokens", f"{formula}standard error {100 * token_error:.1f} %", token_error
        )
    return made


def _asked(spec: Settings, trial: Trial, scale: float) -> dict[str, Estimate]:
    """Tokens and cost of what language models are asked, summed over the annotations."""
    found: dict[str, Estimate] = {}
    for technique in spec.annotations:
        for name, one in technique.estimates(trial.sizes, trial.weights * trial.kept * scale).items():  # type: ignore[attr-defined]
            before = found.get(name)
            formula = f"{before.formula} + {one.formula}" if before else one.formula
            found[name] = one.model_copy(
                update={"value": one.value + (before.value if before else 0.0), "formula": formula}
            )
    return found


def _error(trial: Trial) -> float:
    """Relative standard error of the kept bytes, from differences of neighbouring ranges (Wolter 1984)."""
    sample = trial.sample
    if sample.whole:
        return 0.0
    stands_for = sample.taken() * sample.weights()
    left = np.bincount(trial.range, trial.weights * trial.kept_bytes, len(sample.ranges))
    total = left.sum()
    count = len(left)
    if count < 2 or not total:
        return 1.0
    apart = np.diff(left - stands_for * left.sum() / stands_for.sum())
    variance = (1 - sample.share()) * count / (2 * (count - 1)) * (apart**2).sum()
    return float(variance**0.5 / total)


def _pace(spec: Settings, trial: Trial, scale: float, before_s: float, started_s: float, missing: str) -> Pace:
    """The time at the sample's rates."""
    grow = scale * trial.total(trial.sizes) / trial.sizes.sum()
    kept = trial.total(trial.kept_bytes) * scale
    took = {name: second * grow for name, second in trial.seconds.items()}
    took["read"] = trial.sample.read_s * scale
    if trial.tokens is not None:
        took["tokenize"] = trial.seconds["tokenize"] * kept / max(trial.tokens.num_bytes, 1)
        training = min(kept * (1 - spec.validation_fraction), spec.tokenizer.max_train_bytes)
        power = TRAIN_POWER if spec.tokenizer.path is None else 0.0
        took["train"] = trial.seconds["train"] * (2 * training / max(trial.tokens.num_bytes, 1)) ** power
    took["list"] = before_s
    single = sum(took.get(name, 0.0) for name in ("list", "train", "hash", "finish"))
    each = f"{_said(trial.sample)}; seconds at its rates: {', '.join(f'{name} {second:.2f}' for name, second in took.items())}"
    each += f" (BPE training by the power {TRAIN_POWER} of the text)" if spec.tokenizer.path is None else ""
    each += f", {missing} and without their training" if missing else ""
    return Pace(sum(took.values()) - single, single, started_s, each, bool(missing))


def _memory(spec: Settings, trial: Trial, scale: float) -> Estimate:
    text, tokens = trial.total(trial.sizes) * scale, trial.tokens
    words = 0.0
    if spec.tokenizer.path is None and tokens is not None:
        kept = min(
            trial.total(trial.kept_bytes) * scale * (1 - spec.validation_fraction), spec.tokenizer.max_train_bytes
        )
        words = tokens.words * max(kept / max(tokens.num_bytes, 1), 1.0) ** tokens.more_words
    documents = float(trial.weights.sum()) * scale
    estimate = data_memory(batch_bytes=min(text, BATCH_BYTES), documents=documents, words=words, shared=False)
    held = sum(technique.memory_bytes(documents) for technique in spec.dedups)  # type: ignore[attr-defined]
    if not held:
        return estimate
    return estimate.model_copy(
        update={
            "value": estimate.value + held,
            "formula": f"{estimate.formula} + {held:.3g} B of embeddings, held twice",
        }
    )


def _disk(trial: Trial, scale: float) -> Estimate:
    kept, documents = trial.total(trial.kept_bytes) * scale, trial.total(trial.kept) * scale
    held = trial.kept_bytes.sum()
    exported = sum(trial.written.get(name, 0) for name in ("jsonl", "hugging_face"))
    lost = trial.sizes[trial.kept == 0].sum()
    tokens: Tokens | None = trial.tokens
    rates = {
        "bytes of text": (kept, trial.written.get("documents", 0) / max(held, 1.0)),
        "documents read": (float(trial.weights.sum()) * scale, trial.written.get("signals", 0) / len(trial.sizes)),
        "files beside them": (1.0, _MARGIN_BYTES),
    }
    if exported:
        rates["bytes of exported text"] = (kept, exported / max(held, 1.0))
    if dropped := trial.written.get("dropped", 0):
        gone = max(trial.total(trial.sizes) * scale - kept, 0.0)
        rates["bytes of dropped text"] = (gone, dropped / max(lost, 1.0))
    if tokens is not None:
        rates["tokens"] = (kept / tokens.rate + documents, 2 if tokens.vocab_size <= 1 << 16 else 4)
        rates["documents"] = (documents, 8)
        rates["tokenizer entries"] = (tokens.vocab_size, 40)
    return data_disk(rates)


def _said(sample: Sample) -> str:
    taken = human_bytes(float(sample.taken().sum()))
    if sample.whole:
        return f"sample of all {taken}"
    return f"sample of {taken} in {len(sample.ranges)} ranges, {100 * sample.share():.2g} % of the input"
