"""Forecast: what the stage will take and give, from the rates of a small sample run through every step first."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from hone.base.errors import HoneError
from hone.base.figure import Estimate, human_bytes
from hone.data.annotate import annotate
from hone.data.corpus import BATCH_BYTES, Corpus
from hone.data.language import Identifier
from hone.data.readers.listing import File, Listing
from hone.data.readers.rows import first_rows
from hone.data.readers.streams import head
from hone.data.settings import Settings
from hone.data.tokens import tokenizer as tokenizers
from hone.data.tokens.tokenizer import Encoder
from hone.data.work import Models, opened

SAMPLE_BYTES = 600_000
_SAMPLE_FILES = 64
_LEAST_HEAD_BYTES = 8192
# Training BPE counts words (linear) and merges distinct ones (a power of the text): 0.85 fits 1 to 12 MB of code and prose.
_TRAIN_POWER = 0.85
# Fitted to runs of 3 to 40 MB: what stays resident beyond the sample's own peak.
_LATER_BYTES = 60 << 20
_BYTES_A_DOCUMENT = 130
_COPIES_OF_A_GROUP = 9
_FIRST = "première"
"""Encoded before time is taken: what text beyond ASCII needs is made once."""


class _Sample(NamedTuple):
    """What a sample gave. Bytes of files, of text, of kept text; seconds of each step."""

    file_bytes: float
    corpus: Corpus
    kept_bytes: int
    bytes_per_token: float
    seconds: dict[str, float]


def forecast(
    spec: Settings,
    listing: Listing,
    identifier: Identifier,
    models: Models,
    folder: Path,
    start_memory_bytes: int,
    workers: int,
) -> dict[str, Estimate]:
    """Estimates of time_s, peak_memory_bytes, train_tokens, kept_bytes; {} when the sample holds no document.

    Reads about SAMPLE_BYTES of the listed files and runs filters, deduplication, edits and tokenization on them in `folder`.
    What `workers` can share is taken to be shared evenly.
    """
    begun = time.perf_counter()
    sample = _try_out(spec, listing, identifier, models, folder)
    if sample is None:
        return {}
    spent = time.perf_counter() - begun
    text = listing.num_bytes * sample.corpus.num_bytes / sample.file_bytes
    read_share = 1.0
    if spec.max_bytes is not None and spec.max_bytes < text:
        read_share = spec.max_bytes / text
        text = spec.max_bytes
    kept_fraction = sample.kept_bytes / sample.corpus.num_bytes
    kept = text * kept_fraction
    grow = listing.num_bytes * read_share / sample.file_bytes
    seconds = sample.seconds
    rest = (seconds["read"] + seconds["dedup"] + seconds["encode"]) * grow / workers
    rest += seconds["train"] * min(grow, spec.tokenizer.max_train_bytes / sample.kept_bytes) ** _TRAIN_POWER
    documents = len(sample.corpus) * grow
    growth = psutil.Process().memory_info().rss - start_memory_bytes
    growth += _LATER_BYTES + min(text, BATCH_BYTES) * _COPIES_OF_A_GROUP + documents * _BYTES_A_DOCUMENT
    rates = ", ".join(f"{name} {second / sample.file_bytes * 1e9:.0f}" for name, second in seconds.items())
    said = f"sample of {human_bytes(sample.file_bytes)} of {human_bytes(listing.num_bytes)}"
    tokens = kept * (1 - spec.validation_fraction) / sample.bytes_per_token
    return {
        "time_s": Estimate(
            value=spent + rest,
            unit="s",
            formula=f"{spent:.1f} s for a {said} + file bytes x its rates (ns/B: {rates}), {workers} at a time, BPE training to the power {_TRAIN_POWER}",
        ),
        "peak_memory_bytes": Estimate(
            value=start_memory_bytes + growth,
            unit="B",
            formula=f"memory at start + growth over the {said} + {human_bytes(_LATER_BYTES)} for the later steps + {_COPIES_OF_A_GROUP} copies of a row group of at most "
            f"{human_bytes(BATCH_BYTES)} + {_BYTES_A_DOCUMENT} B a document for {documents:.0f} documents",
        ),
        "train_tokens": Estimate(
            value=tokens,
            unit="tokens",
            formula=f"text bytes x share kept by the filters ({kept_fraction:.3f}, {said}) x train share / bytes a token "
            f"({sample.bytes_per_token:.2f}: geometric mean of seen and unseen half of the sample)",
        ),
        "kept_bytes": Estimate(
            value=kept, unit="B", formula=f"text bytes x share kept by the filters ({said}); duplicates not foreseen"
        ),
    }


def _try_out(spec: Settings, listing: Listing, identifier: Identifier, models: Models, folder: Path) -> _Sample | None:
    """Every step on a sample, timed."""
    folder.mkdir(exist_ok=True)
    files, file_bytes = _choose(listing, folder)
    # Imports, and kernels that are compiled when first called, must not be counted once a byte.
    for name in ("pyarrow.parquet", "tokenizers"):
        importlib.import_module(name)
    smallest = {file.format: file for file in sorted(files, key=lambda file: -file.size)}
    _curate(spec, list(smallest.values()), identifier, models, folder / "first", {})
    seconds: dict[str, float] = {}
    found = _curate(spec, files, identifier, models, folder / "sample", seconds)
    if found is None:
        return None
    corpus, alive, kept_bytes = found
    texts = [text for _, text in corpus.texts(corpus.shards[0], 0, alive)]
    bytes_per_token = _token_rate(spec.tokenizer, texts, folder, seconds)
    return _Sample(max(file_bytes, 1), corpus, max(kept_bytes, 1), bytes_per_token, seconds)


def _curate(
    spec: Settings, files: list[File], identifier: Identifier, models: Models, folder: Path, seconds: dict[str, float]
) -> tuple[Corpus, np.ndarray, int] | None:
    """(documents of `files`, which are kept, their bytes), every step timed into `seconds`; None where there are none."""
    folder.mkdir(exist_ok=True)
    shard = folder / "documents.parquet"
    with _timed(seconds, "read"):
        annotate(
            files,
            shard,
            options=spec.options,
            scorers=opened(spec.scorers, models),
            identifier=identifier,
        )
    corpus = Corpus([shard])
    if not len(corpus):
        return None
    alive = np.ones(len(corpus), bool)
    with _timed(seconds, "dedup"):
        for technique in spec.filters:
            alive &= technique.decide(corpus.columns)[0]
        kept_bytes = int(corpus.columns["bytes"][alive].sum())
        for number, technique in enumerate(spec.dedups):
            state = folder / f"dedup-{number}"
            state.mkdir(exist_ok=True)
            technique.representatives(corpus, alive, state)
        for number, technique in enumerate((*spec.edits, *spec.decontaminations)):
            state = folder / f"cut-{number}"
            state.mkdir(exist_ok=True)
            (technique.cuts if technique in spec.edits else technique.contaminated)(corpus, alive, state)
    if not alive.any():
        alive[:] = True
    return corpus, alive, kept_bytes


def _token_rate(spec: tokenizers.Tokenizer, texts: list[str], folder: Path, seconds: dict[str, float]) -> float:
    """Bytes a token of the tokenizer that is taken, or of one trained on half of `texts`."""
    if spec.path is not None:
        tokenizers.take(spec.path, folder)
        seconds["train"] = 0.0
        encoder = tokenizers.load(folder)
        encoder.encode([_FIRST])
        with _timed(seconds, "encode"):
            return _bytes_per_token(encoder, texts)
    # Cut, so that one long document can be in both halves.
    pieces = [text[start : start + 4000] for text in texts for start in range(0, len(text), 4000)]
    seen, unseen = pieces[::2], pieces[1::2]
    with _timed(seconds, "train"):
        tokenizers.train(spec, seen, folder)
    seconds["train"] *= len(pieces) / len(seen)
    encoder = tokenizers.load(folder)
    encoder.encode([_FIRST])
    with _timed(seconds, "encode"):
        known = _bytes_per_token(encoder, seen)
        new = _bytes_per_token(encoder, unseen) if unseen else known
    # A vocabulary fits what it was trained on too well; the full corpus lies between the two.
    return (known * new) ** 0.5


def _bytes_per_token(encoder: Encoder, texts: list[str]) -> float:
    tokens = sum(map(len, encoder.encode(texts))) - len(texts)
    return sum(len(text.encode()) for text in texts) / max(tokens, 1)


def _choose(listing: Listing, folder: Path) -> tuple[list[File], int]:
    """Files spread over the listing, and how many bytes of the input they stand for, about SAMPLE_BYTES.

    Of a large file that can be cut, a part in proportion.
    """
    if listing.num_bytes <= SAMPLE_BYTES:
        return listing.files, listing.num_bytes
    stride = max(1, round(len(listing.files) / _SAMPLE_FILES))
    spread = [file for start in range(stride) for file in listing.files[start::stride]]
    share = SAMPLE_BYTES / sum(file.size for file in spread[:_SAMPLE_FILES])
    chosen: list[File] = []
    total = 0
    for file in spread:
        size = file.size
        part = max(int(size * share), _LEAST_HEAD_BYTES)
        if size > part and file.format in ("text", "jsonl", "warc", "parquet"):
            prefix = folder / f"prefix-{len(chosen)}"
            try:
                if file.format == "parquet":
                    size = first_rows(file, part, prefix)
                else:
                    content, size = head(file, part), part
                    prefix.write_bytes(content[: content.rfind(b"\n") + 1] or content)
            except HoneError:
                raise
            except Exception:  # it is broken; reading it will say so
                continue
            file = File(prefix, file.name, prefix.stat().st_size, file.format)
        chosen.append(file)
        total += size
        if total >= SAMPLE_BYTES:
            break
    return chosen, total


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begun
