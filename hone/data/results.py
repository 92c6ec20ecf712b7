"""Results: stats.json and samples: what each step kept and dropped, in total and by language and source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import write_atomic, write_jsonl
from hone.data.chain import Chain
from hone.data.corpus import Corpus, Labels, lowest
from hone.data.filters.decide import MOST_ROWS, ranked
from hone.data.reading import Reading
from hone.feed.load import PackedTokens
from hone.readers.documents import SAMPLE_CHARS


def write_results(reading: Reading, chain: Chain, scorers: list[dict[str, Any]], folder: Path) -> None:
    """Writes stats.json, dropped.jsonl and sample.jsonl; `scorers` are the figures of each."""
    spec, corpus, listing = chain.spec, chain.corpus, reading.listing
    write_samples(corpus, chain, reading.shown(), folder)
    sizes = corpus.columns["bytes"]
    labels = {name: corpus.labels(name) for name in ("language", "group")}
    scores = {row["column"]: corpus.columns[row["column"]] for row in scorers}
    stats = {
        "steps": [reading.row(), *chain.steps],
        "languages": count_by(labels["language"], sizes, chain.kept),
        "sources": count_by(labels["group"], sizes, chain.kept),
        "packing": packing(folder, spec.packing.lengths),
        "input": {"files": len(listing.files), "bytes": listing.num_bytes, "digest": listing.digest},
        "scorers": scorer_rows(scorers, corpus.columns),
        "groups": {name: by_group(values, chain.causes, chain.dropped_by, scores) for name, values in labels.items()},
        "warnings": chain.warnings,
    }
    write_atomic(folder / "stats.json", json.dumps(stats, indent=1, ensure_ascii=False).encode())


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


def count_by(labels: Labels, sizes: np.ndarray, chosen: np.ndarray) -> dict[str, dict[str, int]]:
    """{label: {documents, bytes}} of the chosen documents, ranked."""
    names, codes = labels
    documents = np.bincount(codes[chosen], minlength=len(names)).tolist()
    num_bytes = np.bincount(codes[chosen], weights=sizes[chosen], minlength=len(names)).astype(np.int64).tolist()
    rows = zip(names, documents, num_bytes)
    return ranked({name: {"documents": count, "bytes": size} for name, count, size in rows if count})


def by_group(
    labels: Labels, causes: Sequence[tuple[str, str]], dropped_by: np.ndarray, scores: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """The result for each group: {label: {documents, dropped: {'step: reason': documents}, scores: {column: mean}}}.

    `dropped_by` (uint16 [num_documents]) is 1 + the index in `causes` of the (step, reason) that dropped a document, 0 for a kept
    one. Most documents first; from the 41st label on, all are summed as '(other)'. A score that is NaN for a whole group has no mean.
    """
    names, codes = labels
    order = np.argsort(-np.bincount(codes, minlength=len(names)), kind="stable")
    codes = np.minimum(np.argsort(order, kind="stable").astype(np.int32), MOST_ROWS)[codes]
    shown = [names[place] for place in order[:MOST_ROWS]] + ["(other)"] * (len(names) > MOST_ROWS)
    width = len(causes) + 1
    counts = np.bincount(codes * width + dropped_by, minlength=len(shown) * width).reshape(len(shown), width)
    dropped: list[dict[str, int]] = [{} for _ in shown]
    for place, cause in zip(*np.nonzero(counts[:, 1:])):
        key = ": ".join(causes[cause])
        dropped[place][key] = dropped[place].get(key, 0) + int(counts[place, cause + 1])
    means: list[dict[str, float]] = [{} for _ in shown]
    for column, values in scores.items():
        known = np.isfinite(values)
        numbers = np.bincount(codes[known], minlength=len(shown))
        sums = np.bincount(codes[known], weights=values[known], minlength=len(shown))
        for place in np.flatnonzero(numbers):
            means[place][column] = float(sums[place] / numbers[place])
    rows = zip(shown, counts.sum(1).tolist(), dropped, means)
    return {name: {"documents": count, "dropped": lost, "scores": mean} for name, count, lost, mean in rows}


def scorer_rows(scorers: Sequence[dict[str, Any]], columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The figures of each scorer, with the share of documents that a cascade gave to its expensive scorer."""
    dear = [columns.get(f"{row['column']}_dear") for row in scorers]
    return [
        {**row, "dear_share": float(read.mean())} if read is not None and len(read) else dict(row)
        for row, read in zip(scorers, dear)
    ]


def write_samples(corpus: Corpus, chain: Chain, unread: list[dict[str, str]], folder: Path) -> None:
    """Writes dropped.jsonl (`unread`, spans that were cut, samples of what steps dropped) and sample.jsonl (the kept ones with the lowest ids)."""
    shown = lowest(corpus.columns["id"], np.flatnonzero(chain.kept), 4 * chain.spec.num_samples).tolist()
    # Dropped documents are shown as they were read: an edit may have cut all of their text.
    texts = Corpus(corpus.shards).beginnings([one.index for one in chain.dropped], SAMPLE_CHARS)
    kept_texts = corpus.beginnings(shown, SAMPLE_CHARS)
    source = corpus.at("source", [*shown, *(index for one in chain.dropped for index in (one.index, one.like))])
    rows = unread + chain.pieces
    for one in chain.dropped:
        row = {"step": one.step, "reason": one.reason, "source": source[one.index], "text": texts[one.index]}
        if one.elsewhere or one.like != one.index:
            row["duplicate_of"] = one.elsewhere or source[one.like]
        rows.append(row)
    write_jsonl(folder / "dropped.jsonl", rows)
    write_jsonl(folder / "sample.jsonl", [{"source": source[index], "text": kept_texts[index]} for index in shown])
