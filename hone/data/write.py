"""Write: the tables of the data stage: kept documents, and the columns of all documents with what dropped them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from hone.data.chain import Chain
from hone.data.corpus import Part
from hone.data.dedup.groups import COLUMNS, Named
from hone.data.edits.cuts import Cuts, apply_cuts
from hone.data.executors.task import Task
from hone.data.exports import export
from hone.data.filters.decide import DROPPED
from hone.data.work import Work
from hone.text.batch import Texts


def write_tables(splits: dict[str, np.ndarray], chain: Chain, work: Work) -> None:
    """Writes the kept documents and the columns of all documents, each as a folder of Parquet files, one per shard; and the exports."""
    corpus = chain.corpus
    clusters = chain.clusters and chain.clusters.named(corpus.columns["id"])
    documents, signals = [], []
    for part in corpus.parts():
        name, near = f"{part.number:05d}", clusters and clusters.at(part.here)
        chosen = {split: members[part.here] for split, members in splits.items()}
        if any(here.any() for here in chosen.values()):
            given = {"part": part, "splits": chosen, "clusters": near}
            documents.append(Task.of(name, work.state("documents"), given))
        if part.rows:
            dropped_by = {"dropped_by": chain.dropped_by[part.here], "causes": tuple(chain.causes)}
            signals.append(Task.of(name, work.state("signals"), {"part": part, **dropped_by, "clusters": near}))
    work.write("documents", write_kept, documents)
    work.write("signals", write_signals, signals)
    export(chain.spec.export, splits, chain, clusters, work)


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
