"""Decide: applies filters to the columns of one shard, counting what each rule drops also on its own, and again to those of an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, cast

import numpy as np
from pydantic import Field

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.figure import human_bytes
from hone.base.lazy import lazy
from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.data import FILTERS
from hone.data.corpus import Columns, Corpus, Part, lowest
from hone.data.expression import evaluate
from hone.data.filters.base import Filter, Rule, language_places

parquet = lazy("pyarrow.parquet")

DROPPED = ("dropped_by", "reason")
"""The columns of signals/*.parquet after those of a shard: the step that dropped a document, and its reason."""
MOST_ROWS = 40
_AT_ONCE = 100_000


def decide_shard(folder: Path, part: Part, filters: Sequence[Filter], num_samples: int) -> dict[str, Any]:
    """A task: writes what dropped each document of one shard to a file; `filters` of its summary are the rows of `decide`."""
    with_text = any("text" in technique.columns for technique in filters)
    dropped_by, rows = decide(filters, Corpus.of(part).held(part.shard, with_text), num_samples)
    np.save(folder / f"filter-{part.number:05d}.npy", dropped_by)
    return {"rows": len(dropped_by), "filters": rows}


def decide(
    filters: Sequence[Filter], columns: Mapping[str, np.ndarray], num_samples: int
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """(what dropped each document, uint16 [n]; a row of counts per filter, to be summed over shards).

    A document is dropped by the first filter it fails: k + 1 for `causes(filters)`[k], 0 for a kept document.
    `samples` of a row: {reason: [[id, number], ...]}, lowest ids first.
    """
    cause = {pair: number + 1 for number, pair in enumerate(causes(filters))}
    dropped_by = np.zeros(len(columns["bytes"]), np.uint16)
    sizes = columns["bytes"]
    ids = columns["id"].astype(bytes)
    kept = np.ones(len(sizes), bool)
    fails = np.zeros(len(sizes), np.uint16)
    limited = any(rule.limits for technique in filters for rule in technique.rules())
    places = language_places(columns) if limited else None
    for technique in filters:
        for _, failed in _failures(technique, columns, places):
            fails += failed
    rows = []
    for place, technique in enumerate(filters):
        rules = [
            {
                "reason": rule.reason,
                "keep": rule.said,
                "alone": _count(failed, sizes),
                "marginal": _count(failed & (fails == 1), sizes),
            }
            for rule, failed in _failures(technique, columns, places)
        ]
        keep, reasons = technique.decide(columns, places)
        before, kept = kept, kept & keep
        gone = before & ~keep
        samples = {}
        for reason in sorted(set(reasons[gone])):
            here = np.flatnonzero(gone & (reasons == reason))
            dropped_by[here] = cause[place, reason]
            samples[reason] = lowest(ids, here, num_samples).tolist()
        rows.append(
            {
                "documents_in": int(before.sum()),
                "bytes_in": int(sizes[before].sum()),
                "documents_out": int(kept.sum()),
                "bytes_out": int(sizes[kept].sum()),
                "reasons": counted(reasons[gone], sizes[gone]),
                "alone": _count(~keep, sizes),
                "rules": rules,
                "samples": {
                    reason: [[ids[number].decode(), number] for number in numbers]
                    for reason, numbers in samples.items()
                },
            }
        )
    return dropped_by, rows


def causes(filters: Sequence[Filter]) -> list[tuple[int, str]]:
    """(number of the filter, reason) of all rules, in order."""
    return [
        (place, reason)
        for place, technique in enumerate(filters)
        for reason in dict.fromkeys(rule.reason for rule in technique.rules())
    ]


def _failures(
    technique: Filter, columns: Mapping[str, np.ndarray], places: np.ndarray | None
) -> Iterator[tuple[Rule, np.ndarray]]:
    """(rule, bool [n] of the documents that do not meet it) of a filter, each rule evaluated on its own."""
    technique.check(columns)
    applies = evaluate(technique.when, columns)
    for rule in technique.rules():
        yield rule, applies & ~rule.holds(columns, places)


def _count(chosen: np.ndarray, sizes: np.ndarray) -> dict[str, int]:
    return {"documents": int(chosen.sum()), "bytes": int(sizes[chosen].sum())}


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
    shown = {label: _pair(rows[label]) for label in order[:MOST_ROWS]}
    for label in order[MOST_ROWS:]:
        shown["(other)"] = added(shown.get("(other)", {"documents": 0, "bytes": 0}), rows[label])
    return shown


class Redecide(Spec):
    """The filters to apply; by default those of the artifact."""

    filters: tuple[Annotated[Technique, Choice(FILTERS)], ...] = Field(
        (),
        description="Rule filters in order. By default those of the artifact, of which "
        "--filters.N.FIELD=VALUE changes one, counted from 0.",
    )

    @classmethod
    def of(cls, folder: Path | str) -> Self:
        """The filters of the data artifact in `folder`. Raises ArtifactError when there is none."""
        return cls.read({"filters": _artifact(folder).manifest["spec"]["filters"]})


class Redecided(NamedTuple):
    """The result of other filters on all documents that an artifact's stage read.

    `steps` are rows like those of filters in stats.json. `counts` are {documents, bytes} each: `read`; `passed` these filters,
    `passed_before` those of the artifact; `back` pass only now, `gone` passed only before, and `gone_kept` are those of
    `gone` that the artifact keeps. `passes` (bool [num_documents]) is in the order of signals/*.parquet.
    """

    steps: list[dict[str, Any]]
    counts: dict[str, dict[str, int]]
    passes: np.ndarray

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: what each filter leaves, what each rule drops in total and as the only rule, and the difference."""
        read, before = self.counts["read"], self.counts["passed_before"]
        rows: list[tuple[str, str]] = [("read", _said(read))]
        for step in self.steps:
            left = {side: step[f"{side}_out"] for side in read}
            nothing = "; dropped nothing" if left["documents"] == step["documents_in"] else ""
            rows.append((step["name"], f"{_said(left)} left, {_share(left, read)} of the bytes{nothing}"))
            for rule in step["rules"]:
                if rule["alone"]["documents"]:
                    drops = f"alone drops {_said(rule['alone'])}, only it {_said(rule['marginal'])}"
                    rows.append((f"  {rule['reason']}: {rule['keep']}", drops))
        rows.append(("the artifact's own filters", f"{_said(before)} left, {_share(before, read)} of the bytes"))
        rows.append(("come back", _said(self.counts["back"])))
        rows.append(
            ("go", f"{_said(self.counts['gone'])}; the artifact keeps {_said(self.counts['gone_kept'])} of these")
        )
        width = max(len(name) for name, _ in rows)
        yield from (f"{name:{width}}  {words}" for name, words in rows)
        yield "duplicates, edits and decontamination come after the filters: what they remove is not counted here"


def redecide(folder: Path | str, filters: Sequence[Any] | None = None) -> Redecided:
    """The result of `filters` (techniques or their specs as data; None: its own) on the data artifact in `folder`.

    Raises ArtifactError when it has no columns of dropped documents, SpecError for filters that need other columns.
    """
    artifact = _artifact(folder)
    chosen = Redecide.of(folder) if filters is None else Redecide.read({"filters": tuple(filters)})
    if not chosen.filters:
        raise SpecError("there is no filter to apply", fix=f"name some of: {', '.join(FILTERS)}")
    paths = sorted((artifact.folder / "signals").glob("*.parquet"))
    if not paths:
        raise ArtifactError(
            f"{folder} keeps no signals/*.parquet, the columns of what was read",
            fix=f"it is older than they are, or they were removed: make it again with --redo={artifact.folder.name}",
        )
    stats = json.loads((artifact.folder / "stats.json").read_text(encoding="utf8"))
    before = [step["name"] for step in stats["steps"] if step["slot"] == "filter"]
    filters = cast(tuple[Filter, ...], chosen.filters)
    needed = {"id", "bytes"}.union(*(technique.columns for technique in filters))
    totals: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    passes = [np.empty(0, bool)]
    for columns, dropped_by in _held(paths, needed):
        decided, rows = decide(filters, columns, 0)
        for row in rows:
            row.pop("samples")
        totals = added(totals, rows) if totals else rows
        now = decided == 0
        here = _counts(columns["bytes"], now, then=~np.isin(dropped_by, before), kept=dropped_by == "")
        counts = added(counts, here) if counts else here
        passes.append(now)
    steps = [{"name": technique.kind, "slot": "filter", **filter_row(row)} for technique, row in zip(filters, totals)]
    return Redecided(steps, counts, np.concatenate(passes))


def _artifact(folder: Path | str) -> Artifact:
    artifact = Artifact.read(folder)
    if artifact.kind != "data":
        raise ArtifactError(f"{folder} is not a data artifact", fix="give the folder of a data stage")
    return artifact


def _held(paths: Sequence[Path], needed: set[str]) -> Iterator[tuple[Columns, np.ndarray]]:
    """(columns, with those `needed` already read; what dropped each document, '' for none) of consecutive groups of files of about
    _AT_ONCE documents."""
    names = [name for name in parquet.read_schema(paths[0]).names if name not in DROPPED]
    waiting: list[Path] = []
    num_documents = 0
    for path in paths:
        waiting.append(path)
        num_documents += parquet.read_metadata(path).num_rows
        if num_documents >= _AT_ONCE or path == paths[-1]:
            columns = Columns(waiting, names, compact=False)
            columns.read(needed)
            yield columns, Columns(waiting, DROPPED)[DROPPED[0]]
            waiting, num_documents = [], 0


def _counts(sizes: np.ndarray, now: np.ndarray, then: np.ndarray, kept: np.ndarray) -> dict[str, dict[str, int]]:
    """`Redecided.counts` of one shard: documents of `sizes` bytes that pass `now`, passed `then` and are `kept`, bool each."""
    chosen = {
        "read": np.ones(len(sizes), bool),
        "passed": now,
        "passed_before": then,
        "back": now & ~then,
        "gone": then & ~now,
        "gone_kept": kept & ~now,
    }
    return {name: {"documents": int(here.sum()), "bytes": int(sizes[here].sum())} for name, here in chosen.items()}


def _said(count: dict[str, int]) -> str:
    return f"{count['documents']:,} documents ({human_bytes(count['bytes'])})"


def _share(count: dict[str, int], whole: dict[str, int]) -> str:
    return f"{count['bytes'] / max(whole['bytes'], 1):.1%}"
