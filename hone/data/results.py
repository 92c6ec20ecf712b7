"""Results: what each step kept and dropped, with samples, and the kept documents as Parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import write_atomic, write_jsonl
from hone.base.lazy import lazy
from hone.data.corpus import Corpus, publish
from hone.data.edits.cuts import apply_cuts
from hone.data.readers.documents import SAMPLE_CHARS
from hone.data.text.batch import Texts

pa = lazy("pyarrow")
parquet = lazy("pyarrow.parquet")

CUT_OUT = "cut_out"
"""The reason under which stats.json counts what was cut out of documents that stay."""
_MOST_ROWS = 40


def step_row(
    name: str,
    slot: str,
    sizes: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    reasons: np.ndarray,
    left: np.ndarray | None = None,
) -> dict[str, Any]:
    """One step of stats.json. `sizes` bytes, `before` and `after` bool, `reasons` object, all [num_documents].

    `left` are the bytes after a step that cuts; what it takes from documents that stay is counted as CUT_OUT.
    """
    left = sizes if left is None else left
    row = {
        "name": name,
        "slot": slot,
        "documents_in": int(before.sum()),
        "bytes_in": int(sizes[before].sum()),
        "documents_out": int(after.sum()),
        "bytes_out": int(left[after].sum()),
        "reasons": count_by(reasons, sizes, before & ~after),
    }
    cut = int((sizes - left)[after].sum())
    if cut:
        row["reasons"][CUT_OUT] = {"documents": 0, "bytes": cut}
    return row


def count_by(labels: np.ndarray, sizes: np.ndarray, chosen: np.ndarray) -> dict[str, dict[str, int]]:
    """{label: {documents, bytes}} of the chosen documents, most bytes first; beyond 40 labels the rest is '(other)'."""
    names, inverse = np.unique(labels[chosen].astype(str), return_inverse=True)
    documents = np.bincount(inverse, minlength=len(names))
    num_bytes = np.bincount(inverse, weights=sizes[chosen], minlength=len(names)).astype(np.int64)
    order = sorted(range(len(names)), key=lambda index: (-num_bytes[index], names[index]))
    rows = {
        str(names[index]): {"documents": int(documents[index]), "bytes": int(num_bytes[index])}
        for index in order[:_MOST_ROWS]
    }
    rest = order[_MOST_ROWS:]
    if rest:
        rows["(other)"] = {"documents": int(documents[rest].sum()), "bytes": int(num_bytes[rest].sum())}
    return rows


def write_documents(corpus: Corpus, splits: Mapping[str, np.ndarray], state: Path, folder: Path) -> None:
    """Writes the kept documents with all their columns and their split, one Parquet file a shard that kept any."""
    folder.mkdir(exist_ok=True)
    for number, shard, first, end in corpus.spans():
        out = folder / f"{number:05d}.parquet"
        kept = np.zeros(end - first, bool)
        names = np.full(end - first, "", object)
        for split, chosen in splits.items():
            kept |= chosen[first:end]
            names[chosen[first:end]] = split
        if out.exists() or not kept.any():
            continue
        temporary = state / "documents.tmp"
        with parquet.ParquetFile(shard) as source:
            schema = source.schema_arrow.insert(2, pa.field("split", pa.string()))
            with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
                done = 0
                for batch in source.iter_batches(batch_size=512):
                    here = slice(done, done + len(batch))
                    done += len(batch)
                    table = _without_cuts(pa.Table.from_batches([batch]), corpus, number, first + here.start)
                    table = table.add_column(2, "split", pa.array(names[here], pa.string()))
                    writer.write_table(table.filter(pa.array(kept[here])))
        publish(temporary, out)


def _without_cuts(table: Any, corpus: Corpus, number: int, first: int) -> Any:
    """Rows of shard `number` that begin at document `first`, with their texts and 'bytes' as they are after all cuts."""
    cuts = corpus.cuts[number]
    if not len(cuts.document) or not len(table):
        return table
    documents = np.arange(first, first + len(table))
    texts = apply_cuts(Texts.from_arrow(table.column("text").combine_chunks()), documents, cuts)
    for name, values in (("text", texts.to_arrow()), ("bytes", pa.array(corpus.columns["bytes"][documents]))):
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def write_samples(
    corpus: Corpus,
    drops: list[tuple[str, np.ndarray]],
    kept: np.ndarray,
    likes: np.ndarray,
    others: list[dict[str, str]],
    num_samples: int,
    folder: Path,
) -> None:
    """Writes dropped.jsonl (a few documents per step and reason) and sample.jsonl (a few kept ones).

    `drops` holds (step, reasons object [num_documents], '' where the step did not drop it); `likes` (int) names
    the document that stands for a dropped duplicate; `others` are rows that come first. Which few: those with the lowest
    ids, a fixed random choice.
    """
    ids = corpus.columns["id"]
    order = np.argsort(ids, kind="stable")
    picked: list[tuple[str, str, int]] = []
    for step, reasons in drops:
        for reason in sorted(set(reasons[reasons != ""])):
            picked += [(step, reason, int(index)) for index in order[reasons[order] == reason][:num_samples]]
    shown = [int(index) for index in order[kept[order]][: 4 * num_samples]]
    # Of what was dropped its text as it was read: an edit may have cut all of it.
    texts = _texts(Corpus(corpus.shards), [index for _, _, index in picked])
    kept_texts = _texts(corpus, shown)
    source = corpus.columns["source"]
    rows = list(others)
    for step, reason, index in picked:
        row = {"step": step, "reason": reason, "source": str(source[index]), "text": texts[index]}
        if likes[index] != index:
            row["duplicate_of"] = str(source[likes[index]])
        rows.append(row)
    write_jsonl(folder / "dropped.jsonl", rows)
    write_jsonl(folder / "sample.jsonl", [{"source": str(source[index]), "text": kept_texts[index]} for index in shown])


def _texts(corpus: Corpus, indices: list[int]) -> dict[int, str]:
    """The beginning of each of these documents."""
    chosen = np.zeros(len(corpus), bool)
    chosen[indices] = True
    texts = {}
    for _, shard, first, end in corpus.spans():
        if chosen[first:end].any():
            texts.update({index: text[:SAMPLE_CHARS] for index, text in corpus.texts(shard, first, chosen)})
    return texts


def write_stats(path: Path, stats: dict[str, Any]) -> None:
    """Writes stats.json."""
    write_atomic(path, json.dumps(stats, indent=1, ensure_ascii=False).encode())
