"""Write: the last steps of the data stage: a tokenizer, packed tokens and tables of the kept documents."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.data.chain import Chain
from hone.data.corpus import Corpus
from hone.data.executors.base import Pool
from hone.data.executors.task import Function, Task, need_known
from hone.data.exports import LINES, export
from hone.data.results import write_kept, write_signals
from hone.data.tokens import tokenizer as tokenizers
from hone.data.tokens.pack import pack
from hone.data.work import column_tasks, encode, encode_tasks, write_tasks
from hone.feed.packing import PackingSpec


class Place(Protocol):
    """Where steps write; `base.artifact.Draft` is one."""

    folder: Path

    @property
    def state(self) -> Path: ...

    def keep_time(self) -> None: ...


def take_or_train(spec: tokenizers.Tokenizer, corpus: Corpus, train: np.ndarray, place: Place) -> tokenizers.Encoder:
    """Copies the tokenizer into the folder, or trains it on the documents in `train`, unless it is there already."""
    done = place.state / "tokenizer-done"
    if not done.exists():
        if spec.path is not None:
            tokenizers.take(spec.path, place.folder)
        else:
            total = int(corpus.columns["bytes"][train].sum())
            # Families are hashes: those with the highest are a fixed random sample.
            share = min(1.0, spec.max_train_bytes / max(total, 1))
            chosen = train & (corpus.columns["family"] >= np.uint64(int((1 - share) * (2**64 - 1))))
            texts = (text for _, shard, first, _ in corpus.spans() for _, text in corpus.texts(shard, first, chosen))
            tokenizers.train(spec, texts, place.folder)
        write_atomic(done, b"")
    return tokenizers.load(place.folder)


def tokenize(
    packing: PackingSpec,
    corpus: Corpus,
    splits: dict[str, np.ndarray],
    encoder: tokenizers.Encoder,
    place: Place,
    run: Run,
    pool: Pool,
) -> dict[str, dict[str, int]]:
    """Writes every shard's tokens, then all of them concatenated; returns the result of `pack`."""
    state = place.state / "tokens"
    state.mkdir(exist_ok=True)
    planned = encode_tasks(corpus, splits, place.folder, state)
    sizes = corpus.columns["bytes"] * np.logical_or.reduce(list(splits.values()))
    with run.progress("tokenize", int(sizes.sum()), "B") as bar:
        for (_, _, first, end), _ in zip(corpus.spans(), pool.map(encode, planned)):
            bar.advance(int(sizes[first:end].sum()))
            place.keep_time()
    need_known(state, planned)
    return pack(corpus, splits, encoder, state, place.folder / "tokens", packing, durable=place.keep_time)


def write_tables(
    corpus: Corpus, splits: dict[str, np.ndarray], chain: Chain, place: Place, run: Run, pool: Pool
) -> None:
    """Writes the kept documents and the columns of all documents, each as a folder of Parquet files, one per shard; and the exports."""
    clusters = chain.clusters and chain.clusters.named(corpus.columns["id"])

    def write_folder(name: str, function: Function, plan: Callable[[Path], list[Task]]) -> None:
        _write(name, function, plan, place, run, pool)

    write_folder("documents", write_kept, lambda state: write_tasks(corpus, splits, clusters, state))
    write_folder(
        "signals", write_signals, lambda state: column_tasks(corpus, chain.dropped_by, chain.causes, clusters, state)
    )
    export(chain.spec.export, corpus, splits, chain, place.folder, write_folder)


def _write(
    name: str, function: Function, plan: Callable[[Path], list[Task]], place: Place, run: Run, pool: Pool
) -> None:
    """Writes the file of each of the tasks that `plan` makes for a state folder into folder `name` of the artifact."""
    state, folder = place.state / name.replace("/", "-"), place.folder / name
    state.mkdir(exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(state)
    ending = ".jsonl.zst" if name in LINES else ".parquet"
    left = [task for task in planned if not (folder / f"{task.name}{ending}").exists()]  # moved before a kill
    with run.progress(f"write {name}", len(planned)) as bar:
        bar.advance(len(planned) - len(left))
        for task, _ in zip(left, pool.map(function, left)):
            os.replace(state / f"{task.name}{ending}", folder / f"{task.name}{ending}")
            bar.advance()
            place.keep_time()
    need_known(state, planned)
