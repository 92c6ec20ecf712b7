"""Prometheus metrics of the server under the prefix `hone`, and optionally also under another engine's prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)

_USUAL_NAMES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "preemptions": "num_preemptions",
    "prefix_query_tokens": "prefix_cache_queries",
    "prefix_hit_tokens": "prefix_cache_hits",
    "prompt_tokens": "engine_prompt_tokens",
    "output_tokens": "engine_output_tokens",
}
_COUNTERS = {*_USUAL_NAMES.values(), "steps"} - {"num_requests_running", "num_requests_waiting"}


class ServerMetrics:
    """Counters and histograms of one server, in a registry of its own.

    `engine_stats` returns the engine's latest figures; each becomes the gauge `hone:<name>`. `alias` ('vllm') repeats
    every line under that prefix, for dashboards of another engine.
    """

    def __init__(self, model: str, engine_stats: Callable[[], dict[str, float]], alias: str = "") -> None:
        self._registry = CollectorRegistry()
        self._alias = alias
        labels, values = ["model_name"], {"model_name": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"hone:{name}", text, labels, buckets=buckets, registry=self._registry).labels(**values)

        def counter(name: str, text: str, *more: str) -> Counter:
            made = Counter(f"hone:{name}", text, labels + list(more), registry=self._registry)
            return made if more else made.labels(**values)

        self._values = values
        self.first_token_s = histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.between_tokens_s = histogram("inter_token_latency_seconds", "Between two outputs of a request.", _SECONDS)
        self.per_token_s = histogram(
            "request_time_per_output_token_seconds", "Time per output token after the first, per request.", _SECONDS
        )
        self.latency_s = histogram("e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_size = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.choices = histogram("request_params_n", "Choices requested (n).", _COUNTS)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens requested.", _TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens received.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("generation_tokens", "Tokens generated.")
        self._finished = counter("request_success", "Sequences ended, by reason.", "finished_reason")
        self._replies = counter("http_replies", "HTTP replies, by endpoint and status.", "endpoint", "status")
        self._rejections = counter("admission_rejections", "Requests rejected, by reason.", "reason")
        self._registry.register(_EngineGauges(engine_stats, values))

    def finished(self, reason: str) -> None:
        """Counts one sequence that ended with `reason`: stop, length, abort, error."""
        self._finished.labels(**self._values, finished_reason=reason).inc()

    def replied(self, endpoint: str, status: int) -> None:
        """Counts one HTTP reply; `endpoint` must be one of the server's routes (bounds the number of series)."""
        self._replies.labels(**self._values, endpoint=endpoint, status=str(status)).inc()

    def rejected(self, reason: str) -> None:
        """Counts one request rejected before it reached the engine."""
        self._rejections.labels(**self._values, reason=reason).inc()

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        own = generate_latest(self._registry)
        if not self._alias:
            return own
        return own + re.sub(rb"\bhone:", self._alias.encode() + b":", own)


class _EngineGauges(Collector):
    """The engine's figures as gauges, read when Prometheus scrapes."""

    def __init__(self, stats: Callable[[], dict[str, float]], values: dict[str, str]) -> None:
        self._stats = stats
        self._values = values

    def collect(self) -> Iterable[Metric]:
        yield from self._families()

    def describe(self) -> Iterable[Metric]:
        return []  # the names are known only after the engine's first figures

    def _families(self) -> Iterator[Metric]:
        stats = dict(self._stats())
        if stats.get("pages_total"):
            stats["kv_cache_usage_perc"] = stats.get("pages_used", 0) / stats["pages_total"]
            stats["pages"] = stats.pop("pages_total")  # Prometheus reserves _total for counters
        for name, value in stats.items():
            name = _USUAL_NAMES.get(name, name)
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"hone:{name}", f"Engine figure {name}.", labels=list(self._values))
            family.add_metric(list(self._values.values()), float(value))
            yield family
