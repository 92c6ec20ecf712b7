"""Stage `serve`: a measured serving run of one model: deterministic requests, closed loop, figures per request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_jsonl
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.plan import MEMORY, Facts, Plan, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.cost.energy import with_energy
from hone.cost.serving import Traffic
from hone.feed.facts import DataFacts
from hone.measure.machine import Machine
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes
from hone.serve.spec import EngineSpec
from hone.serve.workload import SAMPLE_TOKENS, Workload, draw_requests, make_workload, too_short

if TYPE_CHECKING:
    from hone.model.tokenizer import Tokenizer
    from hone.serve.engine import Engine

np = lazy("numpy")

_WAYS = {
    MEMORY: (
        "serve a quantized model",
        "shorten the requests: prompt_tokens, output_tokens",
        "give the cache fewer bytes: engine.kv_cache_memory_bytes",
    )
}


SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0, "ignore_eos": True}
"""Sampling parameters of the sample texts; the measured requests are greedy."""


class Serve(Stage):
    """Measures serving of greedy requests with prompts from the validation text, `concurrency` at a time."""

    stage: ClassVar[str] = "serve"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": True, "draft": False}

    num_requests: int = Field(96, ge=1, description="Requests of the run.")
    concurrency: int = Field(16, ge=1, description="Requests in flight at once.")
    prompt_tokens: tuple[int, int] = Field((16, 96), description="Least and most tokens of a prompt's own part.")
    output_tokens: tuple[int, int] = Field((16, 96), description="Least and most tokens generated per request.")
    shared_prefix: int = Field(64, ge=0, description="Tokens that all prompts begin with, like a system prompt.")
    engine: EngineSpec = Field(EngineSpec(), description="The engine.")
    seed: int = Field(0, description="Seed of lengths and places in the text.")

    def remedies(self) -> list[list[tuple[str, str]]]:
        most = self.engine.max_num_seqs or 32
        return [[("engine.max_num_seqs", str(count)) for count in (16, 8, 4, 2, 1) if count < most]]

    @model_validator(mode="after")
    def _ranges(self) -> Serve:
        for name in ("prompt_tokens", "output_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} {least}..{most} is not a range of positive numbers")
        return self

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """Time, rate and memory, from the engine's expected steps. Raises SpecError for inputs that do not fit together."""
        from hone.serve.planning import estimates

        model, data = need(facts, "model", CheckpointFacts), need(facts, "data", DataFacts)
        models = [model] + ([need(facts, "draft", CheckpointFacts)] if "draft" in facts else [])
        self._check_draft(len(models) > 1)
        traffic = self._traffic(data.split("val").tokens)
        expected = estimates(self.engine, traffic, models, machine)
        return Plan(estimates=with_energy(expected, machine), ways=_WAYS)

    def _check_draft(self, given: bool) -> None:
        kind = self.engine.drafter.kind if self.engine.drafter else None
        if given != (kind == "draft_model"):
            raise SpecError(
                f"the draft model is {'given' if given else 'missing'} and engine.drafter is {kind or 'empty'}",
                fix="set engine.drafter: draft_model and draft: NAME, or neither",
            )
        if self.engine.draft is not None:
            raise SpecError(
                f"engine.draft is {self.engine.draft}, a folder whose content would not be recorded with the figures",
                fix="give the draft model as an input: draft: NAME in a recipe, --from.draft=FOLDER on the command line",
            )

    def _traffic(self, text_tokens: int) -> Traffic:
        """The run's requests in numbers; exact when data and model share a tokenizer, because lengths are drawn with the places."""
        most = self.shared_prefix + self.prompt_tokens[1]
        if text_tokens < most:
            raise too_short(text_tokens, most)
        drawn = draw_requests(self.num_requests, self.prompt_tokens, self.output_tokens, text_tokens, self.seed)
        return Traffic(
            prompts=tuple(self.shared_prefix + own for own, _, _ in drawn),
            outputs=tuple(length for _, length, _ in drawn),
            shared_prefix=self.shared_prefix,
            concurrency=self.concurrency,
        )

    def run(self, plan: Plan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Serves the requests and writes samples.jsonl."""
        from hone.serve.engine import Engine

        model, guesser = parents["model"], parents.get("draft")
        workload = make_workload(
            parents["data"].folder,
            model.folder,
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            shared_prefix=self.shared_prefix,
            seed=self.seed,
        )
        warm_up(run.device)
        with draft.measuring(Window(run.device)):
            engine = Engine(model.folder, self.engine, draft=guesser.folder if guesser else None, device=run.device)
            run.say(engine.sizes)
            engine.generate([workload.prompts[0]], workload.params(0))  # the first call includes one-time set-up
            engine.pool.clear()
            before = engine.stats()
            with Window(run.device) as serving:
                timings = drive(engine, workload, self.concurrency, run)
            after = engine.stats()
            samples = _samples(engine, workload)
            engine.close()
        write_jsonl(draft.folder / "samples.jsonl", samples)
        write_jsonl(draft.log / "requests.jsonl", [timing.row() for timing in timings])
        for slot, technique in (
            ("drafter", self.engine.drafter),
            ("eviction", self.engine.eviction),
            ("KV policy", self.engine.kv_policy),
        ):
            if technique:
                draft.did({"slot": slot, **technique.model_dump(mode="json")})
        counted = {name: after[name] - before.get(name, 0) for name in after}
        self._record(draft, timings, counted, serving, model.folder)
        draft.record("kv_cache_bytes", engine.cache_bytes, "B", note=engine.sizes)
        draft.record("max_num_seqs", engine.spec.max_num_seqs, "")
        draft.record("max_num_batched_tokens", engine.spec.max_num_batched_tokens, "tokens")

    def _record(
        self, draft: Draft, timings: list[Timing], counted: dict[str, float], serving: Any, folder: Path
    ) -> None:
        tokens = sum(timing.output_tokens for timing in timings)
        ttft = [timing.ttft_s for timing in timings]
        tpot = [timing.tpot_s for timing in timings if timing.tpot_s is not None]
        count = len(timings)
        note = f"{count} requests, {self.concurrency} at once, greedy"
        draft.record("tokens_per_s", tokens / serving.time_s, "tokens/s", n=count, note=f"output tokens; {note}")
        draft.record("requests_per_s", count / serving.time_s, "requests/s", n=count, note=note)
        for name, values, quantile in (("ttft_p50_s", ttft, 50), ("ttft_p99_s", ttft, 99), ("tpot_p50_s", tpot, 50)):
            value = float(np.percentile(values, quantile)) if values else None
            draft.record(name, value, "s", n=len(values), note=note)
        energy = serving.energy_j
        draft.record("joules_per_token", energy / tokens if energy else None, "J/token", note=serving.energy_note)
        asked, hit = counted["prefix_query_tokens"], counted["prefix_hit_tokens"]
        draft.record("prefix_hit_rate", hit / asked if asked else None, "fraction", note="of prompt tokens")
        drafted, accepted = counted.get("draft_tokens", 0), counted.get("accepted_tokens", 0)
        draft.record(
            "acceptance_rate",
            accepted / drafted if drafted else None,
            "fraction",
            note="of drafted tokens" if drafted else "no drafter",
        )
        draft.record("model_bytes", weights_bytes(folder), "B")


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
    """Keeps `concurrency` requests in flight until all are done. Raises RuntimeError when one fails."""
    from hone.serve.request import Request

    timings: list[Timing] = []
    begun = time.perf_counter()
    in_flight = 0
    with run.progress("serving", sum(workload.output_tokens), "tokens") as bar:
        while len(timings) < len(workload.prompts) or in_flight:
            while in_flight < concurrency and len(timings) < len(workload.prompts):
                place = len(timings)
                prompt = workload.prompts[place]
                timings.append(Timing(place, len(prompt), time.perf_counter() - begun))
                engine.add(Request(str(place), prompt, workload.params(place)))
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


def _samples(engine: Engine, workload: Workload) -> list[dict[str, Any]]:
    """Continuations of the first documents, one at a time and seeded, so independent of earlier requests.

    Sampled, because greedy decoding of a small model soon repeats itself. A penalty turns speculation off, so that a draft
    model changes nothing here either.
    """
    from hone.serve.request import SamplingParams

    engine.pool.clear()
    tokenizer: Tokenizer | None = engine.tokenizer
    rows = []
    for prompt in workload.sample_prompts:
        params = SamplingParams(max_tokens=min(SAMPLE_TOKENS, engine.max_model_len - len(prompt)), **SAMPLING)
        done = engine.generate([prompt], params)[0]
        shown = tokenizer.decode(prompt) if tokenizer else " ".join(map(str, prompt))
        text = done.text if tokenizer else " ".join(map(str, done.tokens))
        rows.append({"prompt": shown, "text": text, "sampling": SAMPLING})
    return rows
