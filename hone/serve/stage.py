"""Stage `serve`: a measured serving run of one model: deterministic requests, closed loop, figures per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_jsonl
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, Facts, Plan, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.cost.energy import with_energy
from hone.feed.facts import DataFacts
from hone.measure.clocks.governed import governed
from hone.measure.machine import Machine
from hone.measure.warm import warm_up
from hone.measure.window import Window, power_trace
from hone.model.drafters.folder import DrafterFacts, check_heads_of
from hone.model.facts import CheckpointFacts
from hone.serve.spec import EngineSpec

_WAYS = {
    MEMORY: (
        "serve a quantized model",
        "shorten the requests: prompt_tokens, output_tokens",
        "give the cache fewer bytes: engine.kv_cache_memory_bytes",
    )
}


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
        from hone.serve.bench.workload import traffic_of
        from hone.serve.planning import estimates

        model, data = need(facts, "model", CheckpointFacts), need(facts, "data", DataFacts)
        drafter = facts.get("draft")
        heads = drafter if isinstance(drafter, DrafterFacts) else None
        models = [model] + ([need(facts, "draft", CheckpointFacts)] if "draft" in facts and heads is None else [])
        for one in models:
            one.config.must_predict_tokens(one.where)
        self._check_draft("" if drafter is None else heads.kind if heads else "draft_model")
        if heads is not None:
            check_heads_of(heads, model.config)
        traffic = traffic_of(data.split("val").tokens, concurrency=self.concurrency, **self._requests)
        expected = estimates(self.engine, traffic, models, machine, heads)
        return Plan(estimates=with_energy(expected, machine), ways=_WAYS)

    @property
    def _requests(self) -> dict[str, Any]:
        """The fields that say which requests are sent."""
        return self.model_dump(include={"num_requests", "prompt_tokens", "output_tokens", "shared_prefix", "seed"})

    def _check_draft(self, given: str) -> None:
        """Raises SpecError unless the spec has the drafter of what is `given`: 'draft_model', a kind of heads, or ''."""
        drafter = self.engine.drafter
        kind = drafter.kind if drafter and drafter.needs & {"draft", "heads"} else ""
        if given != kind:
            what = {"": "missing", "draft_model": "given"}.get(given, f"given as {given} heads")
            raise SpecError(
                f"the draft model is {what} and engine.drafter is {drafter.kind if drafter else 'empty'}",
                fix=f"set engine.drafter: {given or kind} and draft: NAME, or neither",
            )
        if self.engine.draft is not None:
            raise SpecError(
                f"engine.draft is {self.engine.draft}, a folder whose content would not be recorded with the figures",
                fix="give the draft model as an input: draft: NAME in a recipe, --from.draft=FOLDER on the command line",
            )

    def run(self, plan: Plan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Serves the requests and writes samples.jsonl."""
        from hone.serve.bench.closed_loop import drive, record, sampled_texts
        from hone.serve.bench.workload import make_workload
        from hone.serve.device.clocked import Clocked
        from hone.serve.engine import Engine

        model, guesser = parents["model"], parents.get("draft")
        workload = make_workload(parents["data"].folder, model.folder, **self._requests)
        warm_up(run.device)
        with draft.measuring(Window(run.device, power_trace(run, draft))):
            engine = Engine(model.folder, self.engine, draft=guesser.folder if guesser else None, device=run.device)
            run.say(engine.sizes)
            engine.generate([workload.prompts[0]], workload.params(0))  # the first call includes one-time set-up
            engine.pool.clear()
            before = engine.stats()
            with governed(run.clock, run.device, run.say) as governor:
                with Window(run.device) as serving:
                    timed = engine if governor is None else Clocked(engine, governor)
                    timings = drive(timed, workload, self.concurrency, run)
                for figure in [] if governor is None else governor.figures():
                    draft.record(**figure.model_dump(exclude={"estimate"}))
            after = engine.stats()
            samples = sampled_texts(engine, workload)
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
        for adapter in engine.adapters.names().values() if engine.adapters is not None else ():
            draft.did({"slot": "adapter", "kind": "lora", "name": adapter.name, "content": adapter.content})
        counted = {name: after[name] - before.get(name, 0) for name in after}
        record(draft, timings, counted, serving, model.folder, self.concurrency)
        draft.record("kv_cache_bytes", engine.cache_bytes, "B", note=engine.sizes)
        draft.record("max_num_seqs", engine.spec.max_num_seqs, "")
        draft.record("max_num_batched_tokens", engine.spec.max_num_batched_tokens, "tokens")
