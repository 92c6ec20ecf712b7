"""Prometheus metrics of the server under the prefix `hone`, and optionally also under another engine's prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hone.serve.http.processes.tallies import Counter, Histogram, Tallies, state_of, summed

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
_COUNTERS = {
    *_USUAL_NAMES.values(),
    "steps",
    "kv_slots",
    "kv_slots_empty",
    "kv_slots_coming",
    "energy_joules",
    "adapter_fills",
} - {
    "num_requests_running",
    "num_requests_waiting",
}

MEANINGS = {
    "num_requests_running": "Sequences that take part in steps now; at most engine.max_num_seqs.",
    "num_requests_waiting": "Sequences in the engine's queue.",
    "requests_outstanding": "Sequences that the HTTP process gave to the engine and that have not ended.",
    "kv_cache_usage_perc": "Used pages over all pages, 0 to 1; cached pages that nobody uses are not counted.",
    "kv_slots": "Slots for a token in used pages, summed over every 8th step.",
    "kv_slots_empty": "Of those, slots behind the last token of their sequence.",
    "kv_slots_coming": "Of those, slots of prompts' tokens that later steps computed.",
    "pages": "Pages of the KV cache.",
    "pages_used": "Pages of running sequences.",
    "pages_free": "Pages that can be given out, those of the prefix cache included.",
    "pages_cached": "Free pages that hold a prefix which later requests may find.",
    "kv_cache_bytes": "Bytes of the KV cache, a draft model's included.",
    "num_preemptions": "Sequences put back into the queue because no page was free; their tokens are computed again.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "engine_prompt_tokens": "Prompt tokens computed in steps, after a preemption again.",
    "engine_output_tokens": "Tokens chosen by steps.",
    "steps": "Steps since the start; it does not grow while work waits: the engine hangs.",
    "last_step_age_seconds": "Seconds since a step ended, or since work arrived at an idle engine.",
    "draft_tokens": "Tokens that the drafter guessed.",
    "accepted_tokens": "Guessed tokens that the model agreed with.",
    "verified_sequences": "Sequences whose guesses steps verified, once a step: accepted_tokens / this + 1 is the tokens that such a step brings.",
    "adapters": "LoRA adapters that clients may ask for.",
    "adapters_in_host_memory": "Adapters whose weights are in host memory; the others are read from disk when they are needed.",
    "adapter_slots": "Slots on the device: adapters that one step may mix (engine.lora.max_loras).",
    "adapter_slots_running": "Slots whose adapter has running sequences.",
    "adapter_fills": "Adapters copied to a slot since the start.",
    "energy_joules": "Joules of the engines' GPUs, or of the processor, since they were opened, idle time included; only where there is a meter.",
    "joules_per_token": "These joules over the tokens chosen by steps since then; only where there is a meter, and after the first token.",
}
"""What each figure of the engine means, by its name here; docs/serving.md has them in its table of metrics."""


REPLICA_MEANINGS = {
    "replica_requests_outstanding": "Sequences in progress at each replica: the load by which requests are routed.",
    "replica_running": "Sequences that take part in steps of each replica now.",
    "replica_waiting": "Sequences in each replica's queue.",
    "replica_kv_cache_usage_perc": "Used pages over all pages of each replica, 0 to 1.",
    "replica_prefix_hit_tokens": "Prompt tokens that each replica found in its prefix cache.",
}
"""What each figure of a replica means (label `replica`); only servers with several have them."""


class ServerMetrics:
    """Counters and histograms of one server, in a registry of its own.

    `engine_stats` returns the engine's latest figures; each becomes the gauge `hone:<name>`. `alias` ('vllm') repeats
    every line under that prefix, for dashboards of another engine. `counted` returns what each of the server's processes
    counted, this one included, where there are several; `each_replica` the figures of each of several engines.
    """

    def __init__(
        self,
        model: str,
        engine_stats: Callable[[], dict[str, float]],
        alias: str = "",
        counted: Callable[[], Iterable[Tallies]] | None = None,
        each_replica: Callable[[], list[dict[str, float]]] = list,
    ) -> None:
        self._registry = CollectorRegistry()
        self._alias = alias
        self._values = {"model_name": model}
        self._counted = counted or (lambda: [state_of(self.settle())])
        self.tallies: list[Counter | Histogram] = []
        self.gaps: dict[tuple[float, float], int] = {}
        """Tokens by the times (s) of the token before and their own: those of one step are counted together."""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"hone:{name}", text, buckets)
            self.tallies.append(made)
            return made

        def counter(name: str, text: str, *more: str) -> Counter:
            made = Counter(f"hone:{name}", text, more)
            self.tallies.append(made)
            return made

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
        self._adapted = counter("adapter_requests", "Sequences with an adapter that ended, by adapter.", "adapter")
        self._adapted_tokens = counter("adapter_generation_tokens", "Tokens generated, by adapter.", "adapter")
        self._replies = counter("http_replies", "HTTP replies, by endpoint and status.", "endpoint", "status")
        self._rejections = counter("admission_rejections", "Requests rejected, by reason.", "reason")
        self._registry.register(_Tallies(self))
        self._registry.register(_EngineGauges(engine_stats, self._values, each_replica))

    def finished(self, reason: str) -> None:
        """Counts one sequence that ended with `reason`: stop, length, abort, error."""
        self._finished.inc(labels=(reason,))

    def adapted(self, adapter: str, tokens: int) -> None:
        """Counts one sequence with `adapter` that ended with so many tokens; "": it had none."""
        if adapter:
            self._adapted.inc(labels=(adapter,))
            self._adapted_tokens.inc(tokens, labels=(adapter,))

    def replied(self, endpoint: str, status: int) -> None:
        """Counts one HTTP reply; `endpoint` must be one of the server's routes (bounds the number of series)."""
        self._replies.inc(labels=(endpoint, str(status)))

    def rejected(self, reason: str) -> None:
        """Counts one request rejected before it reached the engine."""
        self._rejections.inc(labels=(reason,))

    def settle(self) -> list[Counter | Histogram]:
        """All tallies, with `gaps` added to them."""
        for (before, now), count in self.gaps.items():
            self.between_tokens_s.observe(now - before, count)
            self.generated_tokens.inc(count)
        self.gaps.clear()
        return self.tallies

    def families(self) -> Iterator[Metric]:
        """What the server's processes counted, for Prometheus."""
        total = summed(self._counted())
        for one in self.tallies:
            yield one.family(total[one.name], self._values)

    def described(self) -> list[tuple[str, str, str]]:
        """(name as scraped, kind, meaning) of every metric; of a histogram the name of its parts' beginning."""
        rows = []
        for family in self._registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append((name, family.type, family.documentation))
        return rows

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        own = generate_latest(self._registry)
        if not self._alias:
            return own
        return own + re.sub(rb"\bhone:", self._alias.encode() + b":", own)


class _Tallies(Collector):
    """What the front counted, read when Prometheus scrapes."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


class _EngineGauges(Collector):
    """The engine's figures as gauges, read when Prometheus scrapes."""

    def __init__(
        self,
        stats: Callable[[], dict[str, float]],
        values: dict[str, str],
        each_replica: Callable[[], list[dict[str, float]]],
    ) -> None:
        self._stats = stats
        self._values = values
        self._each = each_replica

    def collect(self) -> Iterable[Metric]:
        yield from self._families()

    def describe(self) -> Iterable[Metric]:
        return []  # the names are known only after the engine's first figures

    def _families(self) -> Iterator[Metric]:
        stats = _with_usage(self._stats())
        for name, value in stats.items():
            name = _USUAL_NAMES.get(name, name)
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"hone:{name}", MEANINGS.get(name, f"Engine figure {name}."), labels=list(self._values))
            family.add_metric(list(self._values.values()), float(value))
            yield family
        each = [_with_usage(one) for one in self._each()]
        for name, text in REPLICA_MEANINGS.items():
            family = GaugeMetricFamily(f"hone:{name}", text, labels=[*self._values, "replica"])
            for index, one in enumerate(each):
                value = one.get(name.removeprefix("replica_"))
                if value is not None:
                    family.add_metric([*self._values.values(), str(index)], float(value))
            if each:
                yield family


def _with_usage(stats: dict[str, float]) -> dict[str, float]:
    """`stats` with the share of used pages, by the names that are scraped."""
    stats = dict(stats)
    if stats.get("pages_total"):
        stats["kv_cache_usage_perc"] = stats.get("pages_used", 0) / stats["pages_total"]
        stats["pages"] = stats.pop("pages_total")  # Prometheus reserves _total for counters
    if "processor_joules" in stats:
        stats["energy_joules"] = stats.pop("processor_joules")
    if "energy_joules" in stats and stats.get("output_tokens"):
        stats["joules_per_token"] = stats["energy_joules"] / stats["output_tokens"]
    return stats
