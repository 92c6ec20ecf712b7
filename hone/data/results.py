"""Results: what each step kept and dropped, as counts and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.durable import write_atomic, write_jsonl
from hone.data.corpus import Corpus, Labels
from hone.readers.documents import SAMPLE_CHARS

CUT_OUT = "cut_out"
"""The reason under which stats.json counts text cut out of kept documents."""
DROPPED = ("dropped_by", "reason")
"""The columns of signals/*.parquet after those of a shard: the step that dropped a document, and its reason."""
_MOST_ROWS = 40


class Dropped(NamedTuple):
    """A sample of what step `step` dropped: document `index`; `like` is its representative, or itself; `elsewhere` one outside of the input."""

    step: str
    reason: str
    index: int
    like: int
    elsewhere: str = ""


def step_row(
    name: str,
    slot: str,
    sizes: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    reason: str,
    left: np.ndarray | None = None,
) -> dict[str, Any]:
    """A row of stats.json for a step that drops for one reason. `sizes` bytes, `before` and `after` bool, all [num_documents].

    `left` are the bytes after a step that cuts; bytes cut out of kept documents are counted as CUT_OUT.
    """
    left = sizes if left is None else left
    gone = before & ~after
    num_gone = int(gone.sum())
    row = {
        "name": name,
        "slot": slot,
        "documents_in": int(before.sum()),
        "bytes_in": int(sizes[before].sum()),
        "documents_out": int(after.sum()),
        "bytes_out": int(left[after].sum()),
        "reasons": {reason: {"documents": num_gone, "bytes": int(sizes[gone].sum())}} if num_gone else {},
    }
    cut = int((sizes - left)[after].sum())
    if cut:
        row["reasons"][CUT_OUT] = {"documents": 0, "bytes": cut}
    return row


def counted(labels: np.ndarray, sizes: np.ndarray) -> dict[str, dict[str, int]]:
    """{label: {documents, bytes}}."""
    names, inverse = np.unique(labels.astype(str), return_inverse=True)
    documents = np.bincount(inverse, minlength=len(names)).tolist()
    num_bytes = np.bincount(inverse, weights=sizes, minlength=len(names)).astype(np.int64).tolist()
    return {str(name): {"documents": count, "bytes": size} for name, count, size in zip(names, documents, num_bytes)}


def added(one: Any, other: Any) -> Any:
    """The sum of two shards' counts: numbers are added, also inside lists and mappings; names are kept."""
    if isinstance(one, dict):
        both = {key: added(one[key], other[key]) if key in other else one[key] for key in one}
        return both | {key: value for key, value in other.items() if key not in one}
    if isinstance(one, list):
        return [added(*pair) for pair in zip(one, other, strict=True)]
    return one if isinstance(one, str) else one + other


def filter_row(row: dict[str, Any]) -> dict[str, Any]:
    """The counts of a filter (filters/decide.py) over all shards as in stats.json, in a fixed order, since resumed tasks
    return them in another."""
    names = ("documents_in", "bytes_in", "documents_out", "bytes_out")
    rules = [
        {
            key: rule[key] if isinstance(rule[key], str) else _pair(rule[key])
            for key in ("reason", "keep", "alone", "marginal")
        }
        for rule in row["rules"]
    ]
    counts = {name: row[name] for name in names}
    return {**counts, "reasons": ranked(row["reasons"]), "alone": _pair(row["alone"]), "rules": rules}


def _pair(row: dict[str, int]) -> dict[str, int]:
    return {"documents": row["documents"], "bytes": row["bytes"]}


def ranked(rows: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Most bytes first; from the 41st label on, all are summed as '(other)'."""
    order = sorted(rows, key=lambda label: (-rows[label]["bytes"], label))
    shown = {label: _pair(rows[label]) for label in order[:_MOST_ROWS]}
    for label in order[_MOST_ROWS:]:
        shown["(other)"] = added(shown.get("(other)", {"documents": 0, "bytes": 0}), rows[label])
    return shown


def count_by(labels: Labels, sizes: np.ndarray, chosen: np.ndarray) -> dict[str, dict[str, int]]:
    """{label: {documents, bytes}} of the chosen documents, ranked."""
    names, codes = labels
    documents = np.bincount(codes[chosen], minlength=len(names)).tolist()
    num_bytes = np.bincount(codes[chosen], weights=sizes[chosen], minlength=len(names)).astype(np.int64).tolist()
    rows = zip(names, documents, num_bytes)
    return ranked({name: {"documents": count, "bytes": size} for name, count, size in rows if count})


def lowest(ids: np.ndarray, indices: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `indices` (int [k]) with the lowest `ids` (bytes [n]), in order of ids: a fixed random choice."""
    if not count:
        return indices[:0]
    if len(indices) > count:
        heads = ids[indices].astype("S8").view(">u8").astype(np.uint64)
        indices = indices[heads <= np.partition(heads, count - 1)[count - 1]]
    return indices[np.argsort(ids[indices], kind="stable")][:count]


def by_group(
    labels: Labels, causes: Sequence[tuple[str, str]], dropped_by: np.ndarray, scores: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """The result for each group: {label: {documents, dropped: {'step: reason': documents}, scores: {column: mean}}}.

    `dropped_by` (uint16 [num_documents]) is 1 + the index in `causes` of the (step, reason) that dropped a document, 0 for a kept
    one. Most documents first; from the 41st label on, all are summed as '(other)'. A score that is NaN for a whole group has no mean.
    """
    names, codes = labels
    order = np.argsort(-np.bincount(codes, minlength=len(names)), kind="stable")
    codes = np.minimum(np.argsort(order, kind="stable").astype(np.int32), _MOST_ROWS)[codes]
    shown = [names[place] for place in order[:_MOST_ROWS]] + ["(other)"] * (len(names) > _MOST_ROWS)
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


def write_samples(
    corpus: Corpus,
    dropped: Sequence[Dropped],
    kept: np.ndarray,
    others: list[dict[str, str]],
    num_samples: int,
    folder: Path,
) -> None:
    """Writes dropped.jsonl (`others`, then `dropped`) and sample.jsonl (the kept ones with the lowest ids)."""
    shown = lowest(corpus.columns["id"], np.flatnonzero(kept), 4 * num_samples).tolist()
    # Dropped documents are shown as they were read: an edit may have cut all of their text.
    texts = _texts(Corpus(corpus.shards), [one.index for one in dropped])
    kept_texts = _texts(corpus, shown)
    source = corpus.at("source", [*shown, *(index for one in dropped for index in (one.index, one.like))])
    rows = list(others)
    for one in dropped:
        row = {"step": one.step, "reason": one.reason, "source": source[one.index], "text": texts[one.index]}
        if one.elsewhere or one.like != one.index:
            row["duplicate_of"] = one.elsewhere or source[one.like]
        rows.append(row)
    write_jsonl(folder / "dropped.jsonl", rows)
    write_jsonl(folder / "sample.jsonl", [{"source": source[index], "text": kept_texts[index]} for index in shown])


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
