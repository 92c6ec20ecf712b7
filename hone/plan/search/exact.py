"""The best configurations planned one by one, by the estimates of the stages themselves: pipelines simulated, engines stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.lazy import resolve
from hone.base.plan import MEMORY, Facts, Plan, facts_of
from hone.base.stage import STAGES
from hone.feed.facts import DataFacts, SplitFacts
from hone.plan.search.goal import Goal
from hone.plan.search.ways import Way

BYTES_A_TOKEN, TOKENS_A_DOCUMENT = 4, 1000
"""Of text that is not there yet."""


class Refused(HoneError):
    """A stage does not plan a configuration, or needs more memory than there is."""


def data_facts(goal: Goal, vocab_size: int, tokens: float) -> DataFacts:
    """The goal's data where a data stage made them; else as many tokens as are read once, in a stream."""
    if goal.data is not None and (Path(goal.data) / DataFacts.mark).is_file():
        found = facts_of(Artifact.read(goal.data))
        assert isinstance(found, DataFacts), "DataFacts are recognized by their mark"
        return found
    count = int(max(tokens, 1e6)) + goal.seq_len
    train = SplitFacts(tokens=count, documents=max(count // TOKENS_A_DOCUMENT, 1), bytes=BYTES_A_TOKEN * count)
    val = SplitFacts(tokens=max(count // 1000, 100_000), documents=100, bytes=BYTES_A_TOKEN * 100_000)
    return DataFacts(
        where="data", splits={"train": train, "val": val}, vocab_size=vocab_size, eos_token_id=0, tokenizer=None, exact=False
    )  # fmt: skip


def simulated(way: Way, goal: Goal) -> Way:
    """`way` with the seconds and bytes of its stages' plans. Raises Refused where one does not plan it."""
    recipe = way.recipe(goal, "plan")
    tokens = way.train["tokens"] if way.train else 0.0
    facts: dict[str, Facts] = {"data": data_facts(goal, way.candidate.dims.vocab_size, tokens)}
    if way.train is None or way.candidate.shape is None:
        facts["model"] = way.candidate.checkpoint(way.fleet.served_dtype)
    found = replace(way, evidence="simulated")
    for entry in recipe["stages"]:
        if entry["stage"] == "data":
            continue
        plan = _planned(entry, facts, way)
        found = _with(found, entry["stage"], plan, goal)
        if plan.facts is not None:
            facts = {**facts, "model": plan.facts}
    return found


def _planned(entry: Mapping[str, Any], facts: Mapping[str, Facts], way: Way) -> Plan:
    """The plan of a recipe's stage on the way's machine. Raises Refused."""
    fields = {name: value for name, value in entry.items() if name not in ("stage", "name", "from")}
    roles = [role for role in ("data", "model") if role in entry.get("from", {})]
    machine = way.fleet.machine
    if entry["stage"] != "train":
        machine = machine.model_copy(update={"num_ranks": 1})
    try:
        stage = resolve(STAGES[entry["stage"]]).read(fields)
        plan: Plan = stage.plan({role: facts[role] for role in roles}, machine)
    except HoneError as error:
        raise Refused(f"{entry['stage']}: {error.what}", fix=error.fix) from None
    needed = plan.estimates[MEMORY].value
    if needed > way.fleet.memory_bytes:
        raise Refused(f"{entry['stage']} needs more memory than there is", fix="lower max_num_seqs or the micro-batch")
    return plan


def _with(way: Way, stage: str, plan: Plan, goal: Goal) -> Way:
    """`way` with what the plan of one of its stages says."""
    estimates = plan.estimates
    if stage == "train":
        assert way.train is not None, "only a training has this stage"
        step = way.train["batch_size"] * goal.seq_len / estimates["tokens_per_s"].value
        hours = way.train_hours * step / (way.step_s or step)
        return replace(way, step_s=step, train_hours=hours, train_bytes=estimates[MEMORY].value, notes=plan.notes)
    if stage == "compress":
        return replace(way, compress_hours=estimates["time_s"].value / 3600)
    assert way.engine is not None and way.tokens_per_s is not None, "only a way that serves has this stage"
    replicas = max(way.fleet.count // int(way.engine.get("tensor_parallel_size", 1)), 1)
    rate = estimates["tokens_per_s"].value * replicas
    slower = way.tokens_per_s / rate
    return replace(
        way,
        tokens_per_s=rate,
        tpot_s=(way.tpot_s or 0.0) * slower,
        serve_hours=way.serve_hours * slower,
        serve_bytes=estimates[MEMORY].value,
    )
