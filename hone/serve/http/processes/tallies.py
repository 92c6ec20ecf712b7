"""Counters and histograms as plain numbers: cheap to count in one thread, and summed over processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package is an extra, and an engine's process does without
    from prometheus_client.core import Metric

Tallies = dict[str, dict[tuple[str, ...], list[float]]]
"""By metric and label values: [value] of a counter; of a histogram the sum, then the count of each bucket, infinity last."""


class Counter:
    """A number that grows, for each combination of label values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.values: dict[tuple[str, ...], list[float]] = {} if labels else {(): [0.0]}

    def inc(self, value: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """Adds `value` to the series of these label values."""
        self.values.setdefault(labels, [0.0])[0] += value

    def family(self, values: dict[tuple[str, ...], list[float]], more: dict[str, str]) -> Metric:
        """`values` for Prometheus, with the labels `more` first."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self.name, self.text, labels=[*more, *self.labels])
        for labels, (value,) in values.items():
            family.add_metric([*more.values(), *labels], value)
        return family


class Histogram:
    """How many observations lie in each bucket, and their sum."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self._bounds = name, text, list(bounds)
        self._counts = [0.0] * (2 + len(self._bounds))
        self.values: dict[tuple[str, ...], list[float]] = {(): self._counts}

    def observe(self, value: float, count: int = 1) -> None:
        """Counts `count` equal observations: a bucket holds what is at most its bound."""
        counts = self._counts
        counts[0] += value * count
        counts[1 + bisect_left(self._bounds, value)] += count

    def family(self, values: dict[tuple[str, ...], list[float]], more: dict[str, str]) -> Metric:
        """`values` for Prometheus, with the labels `more`."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self.name, self.text, labels=list(more))
        total, *counts = values[()]
        so_far, buckets = 0.0, []
        for bound, count in zip([*map(float, self._bounds), float("inf")], counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
        family.add_metric(list(more.values()), buckets, total)
        return family


def state_of(tallies: Iterable[Counter | Histogram]) -> Tallies:
    """The numbers of `tallies`, to be sent to another process."""
    return {one.name: {labels: list(values) for labels, values in one.values.items()} for one in tallies}


def summed(states: Iterable[Tallies]) -> Tallies:
    """The sum of the states of several processes."""
    total: Tallies = {}
    for state in states:
        for name, series in state.items():
            into = total.setdefault(name, {})
            for labels, values in series.items():
                before: Any = into.get(labels)
                into[labels] = list(values) if before is None else [a + b for a, b in zip(before, values, strict=True)]
    return total


def adopt(tallies: Iterable[Counter | Histogram], state: Tallies) -> None:
    """Goes on counting from `state`, that of an earlier process."""
    for one in tallies:
        for labels, values in state.get(one.name, {}).items():
            one.values.setdefault(labels, list(values))[:] = values
