"""Write: the last steps of the data stage: a tokenizer, packed tokens and tables of the kept documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.data.chain import Chain
from hone.data.corpus import Corpus, Part
from hone.data.dedup.groups import COLUMNS, Named
from hone.data.edits.cuts import Cuts, apply_cuts
from hone.data.executors.base import Pool
from hone.data.executors.task import Function, Task, need_known
from hone.data.exports import LINES, export
from hone.data.results import DROPPED
from hone.data.tokens import tokenizer as tokenizers
from hone.data.tokens.pack import pack
from hone.data.work import column_tasks, encode, encode_tasks, write_tasks
from hone.feed.packing import PackingSpec
from hone.text.batch import Texts


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


def write_kept(folder: Path, part: Part, splits: Mapping[str, np.ndarray], clusters: Named | None) -> dict[str, Any]:
    """A task: writes the kept documents of one shard with all columns and their split to a Parquet file.

    `splits` maps each split to a bool mask of the shard's documents; `clusters` are those of the shard's documents.
    """
    kept = np.logical_or.reduce(list(splits.values()))
    names = np.full(len(kept), "", object)
    for split, chosen in splits.items():
        names[chosen] = split
    with parquet.ParquetFile(part.shard) as source:
        schema = with_more(source.schema_arrow, clusters)
        with parquet.ParquetWriter(folder / f"{part.number:05d}.parquet", schema, compression="zstd") as writer:
            done = 0
            for batch in source.iter_batches(batch_size=512):
                here = slice(done, done + len(batch))
                table = _without_cuts(pa.Table.from_batches([batch]), part.cuts, part.first + done)
                table = table.add_column(2, "split", pa.array(names[here], pa.string()))
                if clusters is not None:
                    table = clusters.added(table, table.num_columns, here)
                writer.write_table(table.filter(pa.array(kept[here])))
                done += len(batch)
    return {"rows": int(kept.sum())}


def with_more(schema: Any, clusters: Named | None) -> Any:
    """The Arrow schema of kept documents: that of a shard, their split, and their clusters if there are any."""
    schema = schema.insert(2, pa.field("split", pa.string()))
    if clusters is not None:
        for name, kind in zip(COLUMNS, (pa.string(), pa.int32())):
            schema = schema.append(pa.field(name, kind))
    return schema


def write_signals(
    folder: Path, part: Part, dropped_by: np.ndarray, causes: Sequence[tuple[str, str]], clusters: Named | None
) -> dict[str, Any]:
    """A task: writes all columns except the text of every document of one shard to a Parquet file, with what dropped it.

    `dropped_by` (uint16 [the shard's documents]) is 1 + the index in `causes` of the (step, reason), 0 for kept ones, whose
    `dropped_by` and `reason` are null. Columns have the values before any cut, also 'bytes'.
    """
    steps, reasons = ([None, *(cause[side] for cause in causes)] for side in (0, 1))
    with parquet.ParquetFile(part.shard) as source:
        names = [name for name in source.schema_arrow.names if name != "text"]
        kinds = [(name, pa.string()) for name in DROPPED]
        kinds += zip(COLUMNS, (pa.string(), pa.int32())) if clusters is not None else []
        schema = pa.schema([source.schema_arrow.field(name) for name in names] + kinds)
        with parquet.ParquetWriter(folder / f"{part.number:05d}.parquet", schema, compression="zstd") as writer:
            done = 0
            for group in range(source.num_row_groups):
                table = source.read_row_group(group, columns=names)
                here = slice(done, done + len(table))
                codes = pa.array(dropped_by[here])
                done += len(table)
                for name, labels in zip(DROPPED, (steps, reasons)):
                    table = table.append_column(name, pa.array(labels, pa.string()).take(codes))
                if clusters is not None:
                    table = clusters.added(table, table.num_columns, here)
                writer.write_table(table)
    return {"rows": done}


def _without_cuts(table: Any, cuts: Cuts, first: int) -> Any:
    """Rows from document `first` on, with their texts and 'bytes' after `cuts`."""
    if not len(cuts.document) or not len(table):
        return table
    documents = np.arange(first, first + len(table))
    texts = apply_cuts(Texts.from_arrow(table.column("text").combine_chunks()), documents, cuts)
    for name, values in (("text", texts.to_arrow()), ("bytes", pa.array(np.diff(texts.offsets)))):
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table
