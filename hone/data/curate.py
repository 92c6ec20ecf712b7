"""Curate: the steps of the data stage in order, each durable, so that a resumed run writes the same bytes."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.artifact import BEGUN, Draft
from hone.base.durable import write_atomic
from hone.base.errors import FitError, SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.run import Run
from hone.data import EXECUTORS
from hone.data.annotate import tasks
from hone.data.chain import Chain
from hone.data.corpus import Corpus
from hone.data.executors.base import Pool
from hone.data.executors.keeping import keep
from hone.data.executors.task import Task, need_known
from hone.data.forecast import DataPlan
from hone.data.results import by_group, count_by, scorer_rows, write_samples, write_stats
from hone.data.settings import Settings
from hone.data.work import Models, careful, read, read_task, train_scorers
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
        corpus, reading = _read(spec, listing, models, draft, run, pool)
        clock.done("read")
        chain = Chain(spec, corpus, run, pool)
        chain.warnings += reading.pop("warnings")
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
        others = [{"step": "read", **row} for row in reading.pop("samples")] + chain.pieces
        write_samples(corpus, chain.dropped, chain.kept, others, spec.num_samples, draft.folder)
        _write_stats(spec, listing, reading, chain, scorers, draft)
        clock.done("write")
    _record(draft, corpus, chain, rows, reading["bytes_out"])
    if pool.peak_memory_bytes is not None:
        draft.record(
            "worker_memory_bytes",
            pool.peak_memory_bytes,
            "B",
            note="the largest worker; peak_memory_bytes is this process",
        )


def _write_stats(
    spec: Settings,
    listing: Listing,
    reading: dict[str, Any],
    chain: Chain,
    scorers: list[dict[str, Any]],
    draft: Draft,
) -> None:
    """Writes stats.json: what every step removed, by language, source, reason and rule."""
    corpus, sizes = chain.corpus, chain.corpus.columns["bytes"]
    labels = {name: corpus.labels(name) for name in ("language", "group")}
    scores = {row["column"]: corpus.columns[row["column"]] for row in scorers}
    write_stats(
        draft.folder / "stats.json",
        {
            "steps": [reading, *chain.steps],
            "languages": count_by(labels["language"], sizes, chain.kept),
            "sources": count_by(labels["group"], sizes, chain.kept),
            "packing": packing(draft.folder, spec.packing.lengths),
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


def _read(
    spec: Settings, listing: Listing, models: Models, draft: Draft, run: Run, pool: Pool
) -> tuple[Corpus, dict[str, Any]]:
    """All documents as a Corpus in `draft.state`, and the row 'read' of stats.json with samples of unreadable documents."""
    options = spec.options
    state = draft.state / "read"
    state.mkdir(exist_ok=True)
    shards: list[Path] = []
    totals: dict[str, Counter[str]] = {}
    samples = [{"reason": reason, "source": name, "text": ""} for name, reason in listing.broken]
    for _, reason in listing.broken:
        totals.setdefault(reason, Counter())["documents"] += 1
    repaired: Counter[str] = Counter()
    num_documents = num_bytes = num_code = 0
    full = False

    def task(number: int, max_bytes: int | None) -> Task:
        return read_task(
            state,
            number,
            groups[number],
            options=options,
            identifier=spec.identifier,
            languages=spec.languages,
            scorers=spec.scorers,
            models=models,
            max_bytes=max_bytes,
        )

    groups = tasks(listing.files, options)
    planned = [task(number, spec.max_bytes) for number in range(len(groups))]
    with run.progress("read", listing.num_bytes, "B") as bar, closing(pool.map(read, planned, careful)) as results:
        for number, summary in enumerate(results):
            if spec.max_bytes is not None and summary["bytes"] > spec.max_bytes - num_bytes:
                results.close()  # `max_bytes` is reached in this task: read it again up to there, and stop
                planned[number] = task(number, spec.max_bytes - num_bytes)
                summary = next(pool.map(read, planned[number : number + 1], careful))
            shards.append(state / planned[number].arguments["shard"])
            bar.advance(sum(file.size for file in groups[number]))
            draft.keep_time()
            num_documents += summary["rows"]
            num_bytes += summary["bytes"]
            num_code += summary["code"]
            samples += summary["samples"]
            listing.skipped.update(summary["skipped"])
            repaired.update(summary["repaired"])
            for reason, count in summary["broken"].items():
                totals.setdefault(reason, Counter()).update(count)
            if summary["full"]:
                full = True
                run.say(f"stopped reading at max_bytes = {spec.max_bytes}")
                break
    need_known(state, planned)
    reasons = {reason: {"documents": row["documents"], "bytes": row["bytes"]} for reason, row in sorted(totals.items())}
    _tell(listing, reasons, samples, num_documents, full, spec, run)
    step = {
        "name": "read",
        "slot": "reader",
        "documents_in": num_documents + sum(row["documents"] for row in reasons.values()),
        "bytes_in": num_bytes + sum(row["bytes"] for row in reasons.values()),
        "documents_out": num_documents,
        "bytes_out": num_bytes,
        "reasons": reasons,
        "skipped": dict(sorted(listing.skipped.items())),
        "repaired": dict(sorted(repaired.items())),
        "rows_of_code": num_code,
        "samples": _few(samples),
    }
    if num_code:
        run.say(
            f"{num_code} of {num_documents} documents are rows that look like code: their kind is 'code', which rules for prose spare"
        )
    corpus = Corpus(shards)
    step["warnings"] = [
        f"{field} '{name}' has a value in none of {num_documents} documents: check its spelling"
        for field, name in corpus.without(spec.url_field, spec.metadata_fields)
    ]
    for warning in step["warnings"]:
        run.warn(warning)
    return corpus, step


def _few(samples: list[dict[str, str]], most: int = 3) -> list[dict[str, str]]:
    """At most `most` samples for each reason."""
    seen: Counter[str] = Counter()
    kept = []
    for row in sorted(samples, key=lambda row: row["reason"]):
        seen[row["reason"]] += 1
        if seen[row["reason"]] <= most:
            kept.append(row)
    return kept


def _tell(
    listing: Listing,
    reasons: dict[str, Any],
    samples: list[dict[str, str]],
    num_documents: int,
    full: bool,
    spec: Settings,
    run: Run,
) -> None:
    """Reports what could not be read. Raises SpecError when nothing could."""
    found = ", ".join(f"{row['documents']} {reason}" for reason, row in reasons.items())
    num_bad = sum(row["documents"] for row in reasons.values())
    said = (
        [f"set aside {num_bad} of {num_documents + num_bad} documents: {found} (see dropped.jsonl)"] if num_bad else []
    )
    if listing.skipped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in listing.skipped.most_common())
        said.append(f"skipped {listing.skipped.total()} files or records of other kinds: {kinds}")
    if num_documents:
        if said:
            run.say("; ".join(said))
        if "wrong_encoding" in reasons and spec.encoding != "auto":
            run.warn(f"{reasons['wrong_encoding']['documents']} texts are not {spec.encoding}: try --encoding=auto")
        return
    fixes = []
    if full:
        said.append(f"the first is larger than max_bytes = {spec.max_bytes}")
        fixes.append("raise max_bytes")
    if "no_text_field" in reasons:
        shown = next(row["text"] for row in samples if row["reason"] == "no_text_field")
        fixes.append(f"set text_field, which is '{spec.text_field}' now; the first has {shown[:120]}")
    if "wrong_encoding" in reasons and spec.encoding != "auto":
        fixes.append(f"set encoding=auto, or the right encoding; it is '{spec.encoding}' now")
    first = f"; the first is {samples[0]['source']}: {samples[0]['reason']}" if samples else ""
    raise SpecError(
        f"{spec.source}: {len(listing.files)} files ({human_bytes(listing.num_bytes)}) without a document in them "
        f"({'; '.join(said) or 'nothing'}{first})",
        fix="; ".join(fixes) or "give a source with text in it, or set format when files have the wrong endings",
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
