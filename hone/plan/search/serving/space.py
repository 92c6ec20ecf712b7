"""The configurations of serving one model on one machine, and their latency, rate and bytes by the engine's own estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base.errors import HoneError
from hone.cost.memory import serve_bytes
from hone.cost.ranks import HOST_GPUS
from hone.plan.search.goal import Goal
from hone.plan.search.limits import Tally
from hone.plan.search.machines import Fleet
from hone.plan.search.product import Columns, Lookup, Product, kept
from hone.plan.search.quality import Known, key_of
from hone.plan.search.serving.formats import formats_of
from hone.plan.search.shapes import Candidate
from hone.plan.search.ways import Format, Way

if TYPE_CHECKING:
    from hone.cost.serve.serving import Serving
    from hone.model.facts import CheckpointFacts
    from hone.serve.spec import EngineSpec

TOKENS = 1e9
"""Output tokens of a goal that names no number."""

MOST = 3
"""Configurations that stay of each format and KV cache for each of: rate, time a token, time to the first token."""


@dataclass(frozen=True)
class Servings:
    """All ways to serve `candidate` on `fleet`; `losses` are measured qualities by steps, `mixed` formats of several bits."""

    goal: Goal
    candidate: Candidate
    fleet: Fleet
    losses: dict[str, Known]
    mixed: tuple[Format, ...] = ()

    @cached_property
    def product(self) -> Product:
        """The axes, those of a dtype and of ranks first."""
        space, count = self.goal.space, self.fleet.count
        host = min(count, HOST_GPUS) if self.fleet.on_gpu else 1
        most = 512 if self.fleet.on_gpu else 64
        cache = space.kv_cache_dtype or (("auto", "fp8") if self.fleet.on_gpu else ("auto",))
        return Product(
            {
                "format": formats_of(self.goal, self.fleet, self.mixed),
                "tensor": space.tensor_parallel or tuple(1 << n for n in range(host.bit_length())),
                "cache": cache,
                "drafter": space.drafter,
                "step": space.max_num_batched_tokens,
                "seqs": space.max_num_seqs or tuple(1 << n for n in range(most.bit_length())),
            }
        )

    @cached_property
    def _opened(self) -> Any:
        return cache(self._open)

    def _open(self, fmt: int, tensor: int, kv: int) -> tuple[Serving, CheckpointFacts, int] | str:
        """The model in a format as one rank serves it, with the bytes of a cached token; or why it does not work."""
        from hone.serve import planning

        axes = self.product.axes
        spec = self.spec(tensor=axes["tensor"][tensor], cache=axes["cache"][kv])
        facts = self.compressed(axes["format"][fmt])
        if isinstance(facts, str):
            return facts
        try:
            part = planning.of_a_rank(spec, facts)
            page = planning.pages_bytes(spec, [part])
            return planning.serving_of(spec, part, self.fleet.machine), part, page // spec.block_size
        except HoneError as error:
            return error.what

    def spec(self, *, tensor: int = 1, cache: str = "auto", seqs: int = 1, step: int = 2048) -> EngineSpec:
        """The engine of a configuration, its sizes filled in."""
        from hone.serve.planning import sized
        from hone.serve.spec import EngineSpec

        fields = {
            "tensor_parallel_size": tensor,
            "kv_cache_dtype": cache,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": max(step, seqs),
        }
        return sized(EngineSpec.read(fields), self.fleet.machine)

    def compressed(self, one: Format) -> CheckpointFacts | str:
        """The model after the steps of a format, as the compress stage plans it; or why it does not. Its hours are in `hours`."""
        if one.name not in self._compressed:
            self._compressed[one.name] = self._compress(one)
        return self._compressed[one.name][0]

    def hours(self, one: Format) -> float:
        """Of the compression, as planned."""
        self.compressed(one)
        return self._compressed[one.name][1]

    @cached_property
    def _compressed(self) -> dict[str, tuple[Any, float]]:
        return {}

    def _compress(self, one: Format) -> tuple[Any, float]:
        if not one.steps:
            return self.dense, 0.0
        from hone.compress.stage import Compress
        from hone.plan.search.exact import data_facts

        machine = self.fleet.machine.model_copy(update={"num_ranks": 1})
        data = data_facts(self.goal, self.candidate.dims.vocab_size, 1e7)
        try:
            plan = Compress.read(one.compress_fields()).plan({"model": self.dense, "data": data}, machine)
        except HoneError as error:
            return error.what, 0.0
        return plan.facts, plan.estimates["time_s"].value / 3600

    @cached_property
    def dense(self) -> CheckpointFacts:
        """The model as it is, or as a training will leave it."""
        return self.candidate.checkpoint(self.fleet.served_dtype)

    @cached_property
    def costs(self) -> Lookup:
        """By (format, tensor, cache, step, seqs): seconds a token, seconds to the first one, output tokens a second of one replica,
        bytes; NaN where the engine does not serve it."""
        return Lookup(self._costs, 4)

    def _costs(self, fmt: int, tensor: int, kv: int, step: int, seqs: int) -> Sequence[float]:
        from hone.cost.serve.schedule import StepKind

        found = self._opened(fmt, tensor, kv)
        if isinstance(found, str):
            return (np.nan,) * 4
        serving, facts, token_bytes = found
        asked, axes = self.goal.requests, self.product.axes
        count, chunk = axes["seqs"][seqs], axes["step"][step]
        prompt, output = asked.prompt_tokens, asked.output_tokens
        decode = serving.step_seconds(StepKind(count, prompt + output / 2, (), count, 1)).value
        prefill, before = 0.0, 0
        while before < prompt:
            part = min(max(chunk - count, 1), prompt - before)
            prefill += serving.step_seconds(StepKind(0, 0.0, ((before, part),), 1, 1), again=True).value
            before += part
        # Requests of equal lengths begin together, so that a step has the prompts of as many as fit; each answer pays for one prompt.
        together = max(min(count, chunk // prompt), 1)
        shared = prefill
        if together > 1:
            shared = (
                serving.step_seconds(StepKind(0, 0.0, ((0, prompt),) * together, together, 1), again=True).value
                / together
            )
        each = decode + count / output * shared
        longest = prompt + output
        memory = serve_bytes(
            serving.dims,
            weights_bytes=facts.loaded_bytes(facts.dtype),
            kv_bytes=count * longest * token_bytes,
            max_tokens=min(chunk, count * longest),
            max_num_seqs=count,
            context_tokens=count * longest,
            dtype=facts.dtype,
            device=self.fleet.machine.device,
        ).value
        return each, prefill + decode, count / each, memory


def best(of: Servings, tally: Tally) -> list[Way]:
    """The best configurations of each format and KV cache that keep the limits of `tally`, which counts all others."""
    product, ways = of.product, list[Way]()
    tally.asked += product.size
    for block in product.blocks():
        block = _possible(of, block, tally.rejected)
        if not len(block["format"]):
            continue
        tpot, ttft, rate, num_bytes = of.costs(*(block[name] for name in ("format", "tensor", "cache", "step", "seqs")))
        replicas = of.fleet.count // product.column(block, "tensor")
        values = _amounts(of, block, tpot, ttft, rate * replicas, num_bytes)

        def row(index: int, block: Columns = block, figures: Any = (tpot, ttft, rate * replicas, num_bytes)) -> Way:
            return _way(of, block, index, *(float(one[index]) for one in figures))

        good = tally.keep(values, row)
        groups = block["format"] * 64 + block["cache"]
        for group in np.unique(groups[good]):
            places = np.flatnonzero(good & (groups == group))
            picked = {
                int(place)
                for order in (-rate * replicas, tpot, ttft)
                for place in places[np.argsort(order[places], kind="stable")[:MOST]]
            }
            ways += [row(place) for place in sorted(picked)]
    return ways


def _possible(of: Servings, block: Columns, rejected: Counter[str]) -> Columns:
    """The rows that the engine serves; the others counted by its reasons."""
    product = of.product
    bad = of.fleet.count % product.column(block, "tensor") != 0
    rejected["ranks of a replica do not divide the devices"] += int(bad.sum())
    block = kept(block, ~bad)
    bad = product.column(block, "seqs") > product.column(block, "step")
    rejected["more sequences than tokens of a step"] += int(bad.sum())
    block = kept(block, ~bad)
    (tpot, *_) = of.costs(*(block[name] for name in ("format", "tensor", "cache", "step", "seqs")))
    bad = np.isnan(tpot)
    for fmt, tensor, kv in {
        (int(a), int(b), int(c)) for a, b, c in zip(*(block[name][bad] for name in ("format", "tensor", "cache")))
    }:
        same = bad & (block["format"] == fmt) & (block["tensor"] == tensor) & (block["cache"] == kv)
        rejected[str(of._opened(fmt, tensor, kv))[:120]] += int(same.sum())
    return kept(block, ~bad)


def _amounts(of: Servings, block: Columns, tpot: Any, ttft: Any, rate: Any, num_bytes: Any) -> dict[str, Any]:
    """What the limits are compared with; money, time and energy of serving alone are limited where nothing is trained."""
    hours = (of.goal.requests.tokens or TOKENS) / rate / 3600
    loss = [known.value if (known := quality_of(of, one)) is not None else np.nan for one in of.product.axes["format"]]
    found = {
        "memory": num_bytes / of.fleet.memory_bytes,
        "ttft": ttft,
        "tpot": tpot,
        "throughput": rate,
        "loss of compression": np.array(loss)[block["format"]],
    }
    if not of.goal.trains:
        dollars, joules = of.fleet.dollars(hours), of.fleet.joules(hours)
        unknown = np.full(len(rate), np.nan)
        found["budget"] = unknown if dollars is None else dollars
        found["energy"] = unknown if joules is None else joules / 3.6e6
    return found


def quality_of(of: Servings, one: Format) -> Known | None:
    """What a format costs in nats a token: nothing where the weights stay as they are, else what was measured, or what its bits are
    chosen by; None: unknown."""
    if not one.steps:
        return Known(0.0, 0.0, "the weights as they are")
    return of.losses.get(key_of(one.steps, one.allocation), one.quality)


def _way(of: Servings, block: Columns, index: int, tpot: float, ttft: float, rate: float, num_bytes: float) -> Way:
    at = of.product.at(block, index)
    engine = {
        "tensor_parallel_size": at["tensor"],
        "max_num_seqs": at["seqs"],
        "max_num_batched_tokens": at["step"],
        "kv_cache_dtype": at["cache"],
        "max_model_len": of.goal.requests.prompt_tokens + of.goal.requests.output_tokens,
    }
    if at["drafter"] != "none":
        engine["drafter"] = at["drafter"]
    cached = at["cache"] != "auto"
    return Way(
        of.candidate,
        of.fleet,
        format=at["format"],
        compress_hours=of.hours(at["format"]),
        engine=engine,
        tpot_s=tpot,
        ttft_s=ttft,
        tokens_per_s=rate,
        serve_hours=(of.goal.requests.tokens or TOKENS) / rate / 3600,
        serve_bytes=num_bytes,
        quality=None if cached else quality_of(of, at["format"]),
    )
