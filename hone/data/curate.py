"""Curate: the steps of the data stage in order, each durable, so that a resumed run writes the same bytes."""

from __future__ import annotations

import shutil

import numpy as np

from hone.base.artifact import BEGUN, Draft
from hone.base.durable import write_atomic
from hone.base.errors import FitError
from hone.base.figure import Estimate, human_bytes
from hone.base.run import Run
from hone.data import EXECUTORS
from hone.data.chain import Chain
from hone.data.conversations.encode import STEP, encode_all
from hone.data.corpus import Corpus
from hone.data.executors.keeping import keep
from hone.data.forecast import DataPlan
from hone.data.reading import Reading
from hone.data.results import write_results
from hone.data.settings import Settings
from hone.data.tokens.pack import take_or_train, tokenize
from hone.data.work import Work
from hone.data.write import write_tables
from hone.feed.files.listing import SEEN, Listing
from hone.measure.window import Window, power_trace, record_energy_per


def curate(spec: Settings, listing: Listing, plan: DataPlan, draft: Draft, run: Run) -> None:
    """Makes the artifact of the files in `listing` in `draft`. Raises SpecError, naming the step and the reason, when a step drops all documents."""
    executor = EXECUTORS.read(run.executor)
    with draft.measuring(Window("cpu", power_trace(run, draft))), executor.open() as pool:
        _begin_again(spec.source, listing, draft, run)
        work = Work(draft, run, keep(pool, executor.store, draft, listing, run))
        reading = Reading(spec, listing, work)
        models, scorers = reading.train(draft.folder / "scorers")
        work.done("train")
        if plan.pace is not None:
            draft.predict({"time_s": plan.pace.estimate(pool.workers)})
        _need_space(draft, listing, plan.estimates)
        corpus = reading.corpus(models)
        work.done("read")
        chain = Chain(spec, corpus, work)
        chain.warnings += reading.warnings
        for step in (chain.filter, chain.deduplicate, chain.annotate, chain.edit, chain.decontaminate):
            step()
            work.done(step.__name__)
        corpus = chain.corpus
        splits = split(corpus, chain.kept, spec.validation_fraction)
        encoder = take_or_train(spec.tokenizer, corpus, splits["train"], work)
        corpus.columns.forget("family")
        if encoder.why_slow and spec.tokenizer.chat is None:
            run.warn(f"tokenizing with the slow tokenizer (about a fifth of tiktoken's speed): {encoder.why_slow}")
        work.done("tokenizer")
        chats = None
        if spec.tokenizer.chat is not None:
            chats = encode_all(chain, encoder, work)
            splits = {name: members & chain.kept for name, members in splits.items()}
            work.done(STEP)
        marks = {} if spec.tokenizer.chat is None else {"chats": chats, "kind": spec.tokenizer.chat.targets}
        rows = tokenize(spec.packing, corpus, splits, encoder, work, **marks)
        work.done("tokenize")
        write_tables(splits, chain, work)
        write_results(reading, chain, scorers, draft.folder)
        work.done("write")
    _record(draft, corpus, chain, rows, reading.num_bytes)
    if work.pool.peak_memory_bytes is not None:
        draft.record(
            "worker_memory_bytes",
            work.pool.peak_memory_bytes,
            "B",
            note="the largest worker; peak_memory_bytes is this process",
        )


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


def _begin_again(source: object, listing: Listing, draft: Draft, run: Run) -> None:
    """Removes what an interrupted run has made when its input has changed since, or may have."""
    note = draft.state / "input"
    before, now = note.read_text() if note.exists() else "", f"{listing.digest} {listing.seen}"
    if before == now:
        return
    if before:
        changed = "may have" if before.startswith(listing.digest) else "has"
        run.warn(f"{source} {changed} changed since this stage was interrupted; starting it again")
    kept = (BEGUN, draft.state.name, draft.log.name, "elapsed_s", note.name)
    for path in (*draft.folder.iterdir(), *draft.state.iterdir()):
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_atomic(draft.log / SEEN, listing.seen.encode())
    write_atomic(note, now.encode())  # written last: without it the next run starts again


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
    record_energy_per(draft, "joules_per_gb", input_bytes / 1e9, "GB")
    draft.record("input_documents", len(corpus), "documents")
    draft.record("kept_documents", int(kept.sum()), "documents")
    draft.record("kept_bytes", int(corpus.columns["bytes"][kept].sum()), "B")
    draft.record("train_tokens", rows["train"]["tokens"], "tokens")
    draft.record("val_tokens", rows["val"]["tokens"], "tokens")
    if "trained_tokens" in rows["train"]:
        draft.record("trained_tokens", rows["train"]["trained_tokens"], "tokens", note="of the training split")
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
