"""Decide: applies all filters to the columns of one shard and counts what each rule drops, also on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hone.data.expression import evaluate
from hone.data.filters.base import Filter, Rule, language_places
from hone.data.results import counted, lowest


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
    applies = evaluate(technique.when, columns)
    for rule in technique.rules():
        yield rule, applies & ~rule.holds(columns, places)


def _count(chosen: np.ndarray, sizes: np.ndarray) -> dict[str, int]:
    return {"documents": int(chosen.sum()), "bytes": int(sizes[chosen].sum())}
