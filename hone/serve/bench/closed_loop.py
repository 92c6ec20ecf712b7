"""Serves a workload with a fixed number of requests in flight, and records the figures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.artifact import Draft
from hone.base.run import Run
from hone.measure.window import Window
from hone.model.folder import weights_bytes
from hone.serve.bench.workload import SAMPLE_TOKENS, Workload
from hone.serve.engine import Engine
from hone.serve.request import Request, SamplingParams

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0, "ignore_eos": True}
"""Sampling parameters of the sample texts; the measured requests are greedy."""


@dataclass
class Timing:
    """Arrival times of one request's tokens, in seconds since the run began."""

    request: int
    prompt_tokens: int
    begun_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.begun_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first."""
        more = self.output_tokens - 1
        return (self.last_s - self.first_s) / more if more > 0 else None

    def row(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "begun_s": round(self.begun_s, 6),
            "ttft_s": round(self.ttft_s, 6),
            "latency_s": round(self.last_s - self.begun_s, 6),
        }


def drive(engine: Engine, workload: Workload, concurrency: int, run: Run) -> list[Timing]:
    """Keeps `concurrency` requests in flight until all are done, with the engine's adapters in turn. Raises RuntimeError when one fails."""
    timings: list[Timing] = []
    adapters = list(engine.adapters.names()) if engine.adapters is not None else []
    begun = time.perf_counter()
    in_flight = 0
    with run.progress("serving", sum(workload.output_tokens), "tokens") as bar:
        while len(timings) < len(workload.prompts) or in_flight:
            while in_flight < concurrency and len(timings) < len(workload.prompts):
                index = len(timings)
                prompt = workload.prompts[index]
                timings.append(Timing(index, len(prompt), time.perf_counter() - begun))
                adapter = adapters[index % len(adapters)] if adapters else ""
                engine.add(Request(str(index), prompt, workload.params(index), adapter=adapter))
                in_flight += 1
            outputs = engine.step()
            now = time.perf_counter() - begun
            for output in outputs:
                timing = timings[int(output.request_id)]
                if timing.output_tokens == 0:
                    timing.first_s, timing.cached_tokens = now, output.num_cached_tokens
                timing.last_s, timing.output_tokens = now, output.num_output_tokens
                bar.advance(len(output.tokens))
                if output.finish is not None:
                    in_flight -= 1
                    if output.error is not None:
                        raise RuntimeError(f"request {output.request_id} failed: {output.error}")
    return timings


def record(
    draft: Draft, timings: list[Timing], counted: dict[str, float], serving: Window, folder: Path, concurrency: int
) -> None:
    """Records the figures of a run: `counted` is what the engine's counters grew by, `serving` the time and energy."""
    tokens = sum(timing.output_tokens for timing in timings)
    ttft = [timing.ttft_s for timing in timings]
    tpot = [timing.tpot_s for timing in timings if timing.tpot_s is not None]
    count = len(timings)
    note = f"{count} requests, {concurrency} at once, greedy"
    draft.record("tokens_per_s", tokens / serving.time_s, "tokens/s", n=count, note=f"output tokens; {note}")
    draft.record("requests_per_s", count / serving.time_s, "requests/s", n=count, note=note)
    for name, values, quantile in (("ttft_p50_s", ttft, 50), ("ttft_p99_s", ttft, 99), ("tpot_p50_s", tpot, 50)):
        value = float(np.percentile(values, quantile)) if values else None
        draft.record(name, value, "s", n=len(values), note=note)
    energy = serving.energy_j
    for name, per, unit in (("joules_per_token", tokens, "J/token"), ("joules_per_request", count, "J/request")):
        draft.record(name, energy / per if energy else None, unit, n=per, note=serving.energy_note)
    asked, hit = counted["prefix_query_tokens"], counted["prefix_hit_tokens"]
    draft.record("prefix_hit_rate", hit / asked if asked else None, "fraction", note="of prompt tokens")
    slots, empty = counted["kv_slots"], counted["kv_slots_empty"]
    waste = "of the slots in used pages, those behind the last token of their sequence, on average over steps"
    draft.record("page_waste", empty / slots if slots else None, "fraction", note=waste)
    drafted, accepted = counted.get("draft_tokens", 0), counted.get("accepted_tokens", 0)
    draft.record(
        "acceptance_rate",
        accepted / drafted if drafted else None,
        "fraction",
        note="of drafted tokens" if drafted else "no drafter",
    )
    verified = counted.get("verified_sequences", 0)
    each = (verified + accepted) / verified if verified else None
    note = "of a sequence in a step that verifies guesses, the model's own one included" if verified else "no guesses"
    draft.record("tokens_per_verification", each, "tokens", n=int(verified), note=note)
    draft.record("model_bytes", weights_bytes(folder), "B")


def sampled_texts(engine: Engine, workload: Workload) -> list[dict[str, Any]]:
    """Continuations of the first documents, one at a time and seeded, so independent of earlier requests.

    Sampled, because greedy decoding of a small model soon repeats itself. A penalty turns speculation off, so that a draft
    model changes nothing here either.
    """
    engine.pool.clear()
    tokenizer = engine.tokenizer
    rows = []
    for prompt in workload.sample_prompts:
        params = SamplingParams(max_tokens=min(SAMPLE_TOKENS, engine.max_model_len - len(prompt)), **SAMPLING)
        done = engine.generate([prompt], params)[0]
        shown = tokenizer.decode(prompt) if tokenizer else " ".join(map(str, prompt))
        text = done.text if tokenizer else " ".join(map(str, done.tokens))
        rows.append({"prompt": shown, "text": text, "sampling": SAMPLING})
    return rows
