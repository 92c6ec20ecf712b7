"""Curate: the steps of the data stage in order, each durable, so that a resumed run writes the same bytes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.artifact import BEGUN, Draft
from hone.base.durable import write_atomic
from hone.base.errors import FitError
from hone.base.figure import Estimate, human_bytes
from hone.base.run import Run
from hone.data import EXECUTORS
from hone.data.chain import Chain
from hone.data.corpus import Corpus
from hone.data.executors.keeping import keep
from hone.data.forecast import DataPlan
from hone.data.reading import Reading
from hone.data.results import by_group, count_by, scorer_rows, write_samples, write_stats
from hone.data.settings import Settings
from hone.data.work import train_scorers
from hone.data.write import take_or_train, tokenize, write_tables
from hone.feed.files.listing import SEEN, Listing, list_source
from hone.feed.load import PackedTokens
from hone.measure.window import Window


def curate(spec: Settings, plan: DataPlan, draft: Draft, run: Run) -> None:
    """Runs the whole stage into `draft`. Raises SpecError, naming the step and the reason, when a step drops all documents."""
    executor = EXECUTORS.read(run.executor)
    with draft.measuring(Window("cpu")), executor.open() as pool:
        listing = _list(spec, draft, run)
        pool = keep(pool, executor.store, draft, listing, run)
        clock = Clock(draft)
        models, scorers = train_scorers(spec, draft.folder / "scorers", run)
        clock.done("train")
        if plan.pace is not None:
            draft.predict({"time_s": plan.pace.estimate(pool.workers)})
        _need_space(draft, listing, plan.estimates)
        reading = Reading(spec, listing, draft, run)
        corpus = reading.corpus(models, pool)
        clock.done("read")
        chain = Chain(spec, corpus, run, pool)
        chain.warnings += reading.warnings
        chain.filter(draft)
        clock.done("filter")
        for step in (chain.deduplicate, chain.annotate, chain.edit, chain.decontaminate):
            step(draft)
            clock.done(step.__name__)
        corpus = chain.corpus
        splits = split(corpus, chain.kept, spec.validation_fraction)
        encoder = take_or_train(spec.tokenizer, corpus, splits["train"], draft)
        corpus.columns.forget("family")
        if encoder.why_slow:
            run.warn(f"tokenizing with the slow tokenizer (about a fifth of tiktoken's speed): {encoder.why_slow}")
        clock.done("tokenizer")
        rows = tokenize(spec.packing, corpus, splits, encoder, draft, run, pool)
        clock.done("tokenize")
        write_tables(corpus, splits, chain, draft, run, pool)
        others = reading.shown() + chain.pieces
        write_samples(corpus, chain.dropped, chain.kept, others, spec.num_samples, draft.folder)
        _write_stats(reading, chain, scorers)
        clock.done("write")
    _record(draft, corpus, chain, rows, reading.num_bytes)
    if pool.peak_memory_bytes is not None:
        draft.record(
            "worker_memory_bytes",
            pool.peak_memory_bytes,
            "B",
            note="the largest worker; peak_memory_bytes is this process",
        )


def _write_stats(reading: Reading, chain: Chain, scorers: list[dict[str, Any]]) -> None:
    """Writes stats.json: what every step removed, by language, source, reason and rule."""
    corpus, sizes, folder, listing = chain.corpus, chain.corpus.columns["bytes"], reading.draft.folder, reading.listing
    labels = {name: corpus.labels(name) for name in ("language", "group")}
    scores = {row["column"]: corpus.columns[row["column"]] for row in scorers}
    write_stats(
        folder / "stats.json",
        {
            "steps": [reading.row(), *chain.steps],
            "languages": count_by(labels["language"], sizes, chain.kept),
            "sources": count_by(labels["group"], sizes, chain.kept),
            "packing": packing(folder, reading.spec.packing.lengths),
            "input": {"files": len(listing.files), "bytes": listing.num_bytes, "digest": listing.digest},
            "scorers": scorer_rows(scorers, corpus.columns),
            "groups": {
                name: by_group(values, chain.causes, chain.dropped_by, scores) for name, values in labels.items()
            },
            "warnings": chain.warnings,
        },
    )


class Clock:
    """Seconds of each step in the artifact's log/seconds.json; those of earlier, killed runs are added."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self._path = draft, draft.log / "seconds.json"
        self._begun = time.monotonic()

    def done(self, step: str) -> None:
        """Records the seconds since the previous step."""
        now = time.monotonic()
        seconds = json.loads(self._path.read_text(encoding="utf8")) if self._path.exists() else {}
        seconds[step] = seconds.get(step, 0.0) + now - self._begun
        write_atomic(self._path, json.dumps(seconds, indent=1).encode())
        self._begun = now
        self._draft.keep_time()


def split(corpus: Corpus, kept: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """{'train', 'val'}: bool [num_documents] each. Families of documents whose hash is below `fraction` are the validation split.

    Each split gets at least one family when `fraction` > 0 and there are two.
    """
    families = corpus.columns["family"]
    there = np.unique(families[kept])
    num_below = int(np.searchsorted(there, np.uint64(int(fraction * 2**64))))
    if fraction > 0 and len(there) > 1:
        num_below = min(max(num_below, 1), len(there) - 1)
    val = kept & (families <= there[num_below - 1]) if num_below else np.zeros(len(kept), bool)
    return {"train": kept & ~val, "val": val}


def packing(folder: Path, lengths: tuple[int, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """{sequence length: {packing: {rows, waste, parted}}} of the training split without a token budget: padding and split documents
    of both packings."""
    train = PackedTokens(folder)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seq_len in lengths:
        both = {kind: train.packing(seq_len, kind) for kind in ("stream", "best_fit")}
        found[str(seq_len)] = {
            kind: {"rows": row.num_sequences, "waste": row.waste, "parted": row.parted} for kind, row in both.items()
        }
    return found


def _list(spec: Settings, draft: Draft, run: Run) -> Listing:
    """The source's files. A resumed run starts again when its input has changed or may have changed."""
    listing = list_source(spec.source, spec.forced)
    note = draft.state / "input"
    now = f"{listing.digest} {listing.seen}"
    if not note.exists() or note.read_text() != now:
        if note.exists():
            changed = "may have" if note.read_text().startswith(listing.digest) else "has"
            run.warn(f"{spec.source} {changed} changed since this stage was interrupted; starting it again")
        kept = (BEGUN, draft.state.name, draft.log.name, "elapsed_s", note.name)
        for path in (*draft.folder.iterdir(), *draft.state.iterdir()):
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_atomic(draft.log / SEEN, listing.seen.encode())
        write_atomic(note, now.encode())  # written last: without it the next run starts again
    return listing


def _need_space(draft: Draft, listing: Listing, estimates: dict[str, Estimate]) -> None:
    """Raises FitError when the disk cannot hold shards, documents and tokens, each about as large as the kept text at most."""
    text = estimates["kept_bytes"].value if "kept_bytes" in estimates else listing.num_bytes
    free = shutil.disk_usage(draft.folder).free
    if free < 2 * text:
        raise FitError(
            f"{draft.folder} needs about {human_bytes(2 * text)} of disk, has {human_bytes(free)}",
            fix="free some space, choose another output folder, or set max_bytes",
        )


def _record(draft: Draft, corpus: Corpus, chain: Chain, rows: dict[str, dict[str, int]], input_bytes: int) -> None:
    """Records the stage's figures and its techniques."""
    kept = chain.kept
    draft.record("input_bytes", input_bytes, "B")
    draft.record("input_documents", len(corpus), "documents")
    draft.record("kept_documents", int(kept.sum()), "documents")
    draft.record("kept_bytes", int(corpus.columns["bytes"][kept].sum()), "B")
    draft.record("train_tokens", rows["train"]["tokens"], "tokens")
    draft.record("val_tokens", rows["val"]["tokens"], "tokens")
    tokens = sum(row["tokens"] - row["documents"] for row in rows.values())
    num_bytes = sum(row["bytes"] for row in rows.values())
    draft.record("bytes_per_token", num_bytes / max(tokens, 1), "B/token", note="end-of-text tokens not counted")
    asked = [row["figures"] for row in chain.steps if row["slot"] == "annotation"]
    if asked:
        draft.record("llm_tokens", sum(row["tokens_in"] + row["tokens_out"] for row in asked), "tokens")
        draft.record("llm_cost", sum(row["cost"] for row in asked), "1", note="by price_in and price_out")
    spec = chain.spec
    for slot, techniques in (
        ("scorer", spec.scorers),
        ("filter", spec.filters),
        ("dedup", spec.dedups),
        ("annotation", spec.annotations),
        ("edit", spec.edits),
        ("decontamination", spec.decontaminations),
    ):
        for technique in techniques:
            draft.did({"slot": slot, **technique.model_dump(mode="json")})
