"""Predict: time, memory, tokens and bytes kept of a run of the data stage, each with its formula and what its sample is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from hone.base.figure import Estimate, human_bytes
from hone.data.corpus import BATCH_BYTES
from hone.data.forecasting.pieces import CERTAIN, Extent, Sample, choose, extents_of
from hone.data.forecasting.trial import SHARD_BYTES, Rate, Tools, Trial, attempt, first, token_rate
from hone.data.language import Identifier
from hone.data.readers.listing import Listing
from hone.data.settings import Settings
from hone.data.work import Models
from hone.measure.window import Window

SAMPLE_BYTES = (16 << 20, 64 << 20)
"""Least and most text of a sample; smaller inputs are tried out whole."""
_SAMPLE_SHARE = 0.01
_DEAR_BYTES = 600_000
"""Text of a sample where a scorer reads less than a megabyte a second."""
_DEAR = ("neural", "cascade", "function")
_REMOTE_BYTES = 2 << 20
_DEAR_FORMATS = {"python": 4}
"""Taking a module of the library apart takes longer than measuring its text."""
# Training BPE counts words (linear) and merges distinct ones (a power of the text): 0.85 fits 1 to 12 MB of code and prose.
_TRAIN_POWER = 0.85
_BYTES_A_DOCUMENT = 60
"""Columns and keys of the calling process: the slope of its peak over runs of 0.1, 1 and 10 GB (docs/scale.md)."""
_COPIES = 9
"""Of a batch: text, offsets, words, columns, Arrow's and what is compressed."""
_BYTES_A_WORD = 800
"""What training BPE holds for a distinct word: 720 to 970 B at 1 to 16 MB of text in 76 languages."""
_SIGMAS = 3.0
_LEAST_TOLERANCE = 0.01
_LEAST_DOCUMENTS = 10


def forecast(
    spec: Settings,
    listing: Listing,
    identifier: Identifier,
    models: Models,
    folder: Path,
    window: Window,
    workers: int,
) -> dict[str, Estimate]:
    """Estimates of time_s, peak_memory_bytes, train_tokens, kept_bytes; {} when the sample holds no document.

    Takes a sample of the listed files (pieces.py) and runs filters, deduplication, edits, decontamination and tokenization
    on it in `folder`. What `workers` can share is taken to be shared evenly. `window` is open over all of the stage: what it
    has seen so far, such as the training of scorers, counts too.
    """
    begun = time.perf_counter()
    folder.mkdir(exist_ok=True)
    tools = Tools(identifier, models)
    extents = extents_of(listing.files)
    num_bytes = sample_bytes(spec, extents)
    started_s = 0.0
    trial = None
    if spec.max_bytes is not None:
        scout = choose(extents, num_bytes // 8, spec.options, folder / "scout-pieces")
        started_s = first(spec, tools, scout, folder / "first")
        seen = attempt(spec, tools, scout, folder / "scout")
        if seen is not None and seen.text_bytes > spec.max_bytes:
            extents = _up_to(spec.max_bytes, extents, seen)
        num_bytes = sample_bytes(spec, extents)
    sample = choose(extents, num_bytes, spec.options, folder / "pieces")
    started_s = started_s or first(spec, tools, sample, folder / "first")
    trial = attempt(spec, tools, sample, folder / "sample")
    if trial is None:
        return {}
    rate = token_rate(spec.tokenizer, trial, folder)
    with Window("cpu"):  # brings the outer window up to date
        pass
    spent = time.perf_counter() - begun
    scale = min(spec.max_bytes / trial.text_bytes, 1.0) if spec.max_bytes is not None else 1.0
    return {
        "time_s": _time(spec, trial, scale, spent, started_s if workers > 1 else 0.0, rate.encoded, workers),
        "peak_memory_bytes": _memory(spec, trial, scale, rate, window, workers == 1),
        **_yields(spec, trial, scale, rate),
    }


def sample_bytes(spec: Settings, extents: Sequence[Extent]) -> int:
    """Text that a sample of the input has, so that it takes a second or two, or a few hundredths of the run."""
    if any(extent.file.url for extent in extents):
        return _REMOTE_BYTES
    if any(scorer.kind in _DEAR for scorer in spec.scorers):
        return _DEAR_BYTES
    least, most = SAMPLE_BYTES
    total = sum(extent.content for extent in extents)
    dear = sum(extent.content * _DEAR_FORMATS.get(extent.file.format, 1) for extent in extents)
    return int(min(max(_SAMPLE_SHARE * total, least), most) * total / max(dear, 1))


def _up_to(num_bytes: float, extents: Sequence[Extent], seen: Trial) -> list[Extent]:
    """The first of `extents` that hold `num_bytes` of text, by what a byte of their kind held in `seen`."""
    pieces = seen.sample.pieces
    text = dict.fromkeys(seen.sample.weights, 0.0)
    size = dict.fromkeys(seen.sample.weights, 0.0)
    for number, found in zip(seen.piece.tolist(), seen.sizes.tolist()):
        text[pieces[number].stratum] += found
    for piece in pieces:
        size[piece.stratum] += piece.num_bytes
    chosen: list[Extent] = []
    for extent in extents:
        holds = extent.num_bytes * text.get(extent.stratum, 0.0) / max(size.get(extent.stratum, 0.0), 1.0)
        chosen.append(extent._replace(share=min(num_bytes / holds, 1.0) if holds else 1.0))
        num_bytes -= holds
        if num_bytes <= 0:
            break
    return chosen


def _yields(spec: Settings, trial: Trial, scale: float, rate: Rate) -> dict[str, Estimate]:
    """What is left: bytes and tokens."""
    kept = trial.kept_bytes * scale
    said = _said(trial.sample)
    share = trial.kept_bytes / max(trial.text_bytes, 1)
    error = _error(trial)
    bound = (bool(spec.edits) and not trial.sample.whole) or (trial.copies is not None and trial.copies.unseen)
    enough = (trial.left > 0).sum() >= _LEAST_DOCUMENTS
    known = None if bound or not enough else max(_SIGMAS * error, _LEAST_TOLERANCE)
    how = f"{said}; standard error {100 * error:.1f} %"
    if spec.dedups and not trial.sample.whole:
        how += "; copies outside of the sample " + (
            "not foreseen" if trial.copies is None or trial.copies.unseen else "by those between its pieces"
        )
    if spec.edits and not trial.sample.whole:
        how += "; of edits only what the sample repeats"
    train = 1 - spec.validation_fraction
    tokens = train * (kept / rate.bytes_a_token + trial.kept_documents * scale)
    part = 1 - min(rate.encoded / max(kept, 1), 1)
    # Which documents are held out is drawn by hash: so many bytes more or less.
    drawn = (1 - train) / train * float((trial.weights * trial.kept**2).sum()) / max(trial.kept_bytes, 1) ** 2 / scale
    token_error = (error**2 + drawn + part * rate.error**2 + (rate.gap / 4) ** 2) ** 0.5
    return {
        "train_tokens": Estimate(
            value=tokens,
            unit="tokens",
            formula=f"(text bytes x share kept ({share:.3f}, {how}) / bytes a token ({rate.bytes_a_token:.2f}"
            f"{': geometric mean of seen and unseen half of the sample' if rate.gap else ''}) + an end a document) x train share; standard error {100 * token_error:.1f} %",
            bound=bound,
            tolerance=None if known is None else max(_SIGMAS * token_error, _LEAST_TOLERANCE),
        ),
        "kept_bytes": Estimate(
            value=kept, unit="B", formula=f"text bytes x share kept ({share:.3f}, {how})", bound=bound, tolerance=known
        ),
    }


def _error(trial: Trial) -> float:
    """Relative standard error of the kept bytes: of the sample's pieces, each beside the next (Wolter 1984), and of the copies."""
    if trial.sample.whole:
        return 0.0
    pieces = trial.sample.pieces
    drawn = np.array([piece.stratum[-1] != CERTAIN for piece in pieces])
    numbers = np.array([piece.number for piece in pieces])
    stands_for = np.array([piece.num_bytes * trial.sample.weights[piece.stratum] for piece in pieces])
    left = np.bincount(trial.piece, trial.weights * trial.kept, len(pieces))
    total = left.sum()
    _, ranges = np.unique(numbers[drawn], return_inverse=True)
    stands_for, left = np.bincount(ranges, stands_for[drawn]), np.bincount(ranges, left[drawn])
    count = len(left)
    if count < 2 or not total:
        return 1.0
    apart = np.diff(left - stands_for * left.sum() / stands_for.sum())
    variance = (1 - trial.sample.share) * count / (2 * (count - 1)) * (apart**2).sum()
    copies = trial.copies
    doubt = copies.doubt / max(copies.weights.mean(), 1e-9) if copies is not None else 0.0
    return float((variance / total**2 + doubt**2) ** 0.5)


def _time(
    spec: Settings, trial: Trial, scale: float, spent: float, started_s: float, encoded: int, workers: int
) -> Estimate:
    seconds = trial.seconds
    grow = scale / trial.sample.share
    kept = trial.kept_bytes * scale
    rest = (seconds["read"] + seconds["decide"] + seconds["write"]) * grow / workers
    rest += seconds["encode"] * kept / max(encoded, 1) / workers + started_s
    training = min(kept * (1 - spec.validation_fraction), spec.tokenizer.max_train_bytes)
    rest += seconds.get("train", 0.0) * (2 * training / max(encoded, 1)) ** _TRAIN_POWER
    rates = ", ".join(f"{name} {second:.2f}" for name, second in seconds.items())
    return Estimate(
        value=spent + rest,
        unit="s",
        formula=f"{spent:.1f} s for a {_said(trial.sample)} (seconds: {rates}) + as much a byte of the rest, {workers} at a time, "
        f"BPE training to the power {_TRAIN_POWER}" + (f" + {started_s:.1f} s to start workers" if started_s else ""),
    )


def _memory(spec: Settings, trial: Trial, scale: float, rate: Rate, window: Window, in_process: bool) -> Estimate:
    """The most this process holds: what the trial took, or what stays of it beside the largest of what comes later."""
    text, documents = trial.text_bytes * scale, float(trial.weights.sum()) * scale
    peak, start = window.peak_memory_bytes, window.start_memory_bytes
    stays = psutil.Process().memory_info().rss
    batch = max(min(text, BATCH_BYTES) - min(SHARD_BYTES, trial.sizes.sum()), 0) * _COPIES if in_process else 0.0
    training = 0.0
    if spec.tokenizer.path is None:
        kept = min(trial.kept_bytes * scale * (1 - spec.validation_fraction), spec.tokenizer.max_train_bytes)
        training = rate.words * max(kept / max(rate.encoded, 1), 1.0) ** rate.more_words * _BYTES_A_WORD
    value = max(peak, stays + batch, stays + training) + documents * _BYTES_A_DOCUMENT
    said = [f"{human_bytes(peak)} up to the end of the sample's run ({human_bytes(start)} at start)"]
    if in_process:
        said.append(f"{human_bytes(stays)} that stay + {_COPIES} copies of {human_bytes(batch / _COPIES)} more a batch")
    if training:
        said.append(
            f"{human_bytes(stays)} that stay + {_BYTES_A_WORD} B for each of {training / _BYTES_A_WORD:.0f} words to train on "
            f"({rate.words} in the sample, to the power {rate.more_words:.2f} of the text)"
        )
    formula = f"the most of {'; '.join(said)}" if len(said) > 1 else said[0]
    return Estimate(
        value=value, unit="B", formula=f"{formula}; and {_BYTES_A_DOCUMENT} B for each of {documents:.0f} documents"
    )


def _said(sample: Sample) -> str:
    if sample.whole:
        return f"sample of all {human_bytes(sample.num_bytes)}"
    return f"sample of {human_bytes(sample.num_bytes)} in {len(sample.pieces)} pieces, {100 * sample.share:.2g} % of the input"
