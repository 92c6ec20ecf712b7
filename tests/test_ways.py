"""Ways out that a plan proposes were tried first: they change what is set, and need less memory."""

from __future__ import annotations

import re

import pytest

from hone.base.figure import human_bytes
from hone.base.plan import MEMORY
from hone.compress.stage import Compress
from hone.eval.stage import Eval
from hone.feed.facts import DataFacts, SplitFacts
from hone.measure.machine import Machine, describe
from hone.model.facts import CheckpointFacts
from hone.train.stage import Train
from tests.cost.published import data, machine, megatron_spec

SPLITS = {name: SplitFacts(tokens=10**6, documents=100, bytes=10**6) for name in ("train", "val")}
DATA = DataFacts(where="data-text", splits=SPLITS, vocab_size=320, eos_token_id=0, tokenizer=None)


def ways(spec, facts, monkeypatch, share: float) -> tuple[str, ...]:
    """What is proposed where `share` of the memory that the plan needs is free."""
    plan = spec.plan(facts, describe())
    free = share * plan.estimates[MEMORY].value
    monkeypatch.setattr(Machine, "free_memory_bytes", property(lambda _: free))
    return spec.with_ways(plan, facts, describe()).ways[MEMORY]


def checked(spec, facts, said: str) -> float:
    """The memory that the change in `said` really needs; it says the same."""
    name, before, value = re.match(r"([\w.]+) (\S+) -> (\w+): \S+ \w+ instead of ", said).groups()
    now = getattr(spec, name)
    assert str(getattr(now, "kind", now)) == before != value
    return spec.override({name: value}).plan(facts, describe()).estimates[MEMORY].value


def test_what_is_proposed_fits(monkeypatch):
    spec = Train.read({"steps": 10, "batch_size": 16, "seq_len": 256})
    before = spec.plan({"data": DATA}, describe()).estimates[MEMORY].value
    found = ways(spec, {"data": DATA}, monkeypatch, 0.7)
    assert len(found) == 3 and found[0].startswith("gradient_accumulation_steps 1 -> 2: ")
    assert all(said.endswith(f" instead of {human_bytes(before)}") for said in found)
    assert all(checked(spec, {"data": DATA}, said) < before for said in found)
    assert checked(spec, {"data": DATA}, found[0]) <= 0.7 * before


def test_what_is_set_already_or_does_not_help_is_not_proposed(monkeypatch):
    spec = Train.read(
        {
            "steps": 10,
            "batch_size": 4,
            "seq_len": 64,
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": "full",
        }
    )
    found = ways(spec, {"data": DATA}, monkeypatch, 0.01)
    assert not any("gradient_accumulation_steps" in said or "full" in said or "seq_len" in said for said in found)
    assert found[0].startswith("no single change fits: the least of all that was tried is ")
    assert "use a smaller model" in found


LARGE = {
    **megatron_spec(12288, 96, 96, 1536, 1, 1, 1), "steps": 1, "precision": "bf16", "validation": {"sequences": 1},
}  # fmt: skip
"""GPT-3's sizes, with single sequences as micro-batches and every layer recomputed."""


@pytest.mark.parametrize("recomputed", ["full", pytest.param("every_nth", marks=pytest.mark.slow)])
def test_175_billion_weights_on_one_device_need_ranks(recomputed):
    """Nothing that is set already is proposed, and the ranks that are said to be enough are."""
    spec, one = Train.read({**LARGE, "activation_checkpointing": recomputed}), machine("H100", 1)
    facts = {"data": data(51200)}
    plan = spec.plan(facts, one)
    first, *others = spec.with_ways(plan, facts, one).ways[MEMORY]
    ranks, said = re.match(r"no single change fits: (\d+) ranks do, with (.*) \(", first).groups()
    changes = dict(re.findall(r"([\w.]+) \S+ -> (\w+)", said))
    assert changes["parallelism.data_parallel"] == "zero3" and recomputed not in changes.values()
    needed = spec.override(changes).plan(facts, one.on_ranks(int(ranks))).estimates[MEMORY].value
    assert (
        needed
        <= one.free_memory_bytes
        < spec.override(changes).plan(facts, one.on_ranks(int(ranks) // 2)).estimates[MEMORY].value
    )
    assert not any("gradient_accumulation_steps" in way or f"-> {recomputed}" in way for way in others)


def test_several_changes_are_proposed_together_where_one_is_not_enough(monkeypatch):
    spec = Train.read({"steps": 10, "batch_size": 16, "seq_len": 256})
    found = ways(spec, {"data": DATA}, monkeypatch, 0.2)
    said, needed = re.match(r"no single change fits: (.*) together do, with (.*)", found[0]).groups()
    changes = dict(re.findall(r"([\w.]+) \S+ -> (\w+)", said))
    assert len(changes) > 1
    both = spec.override(changes).plan({"data": DATA}, describe()).estimates[MEMORY].value
    assert human_bytes(both) == needed and both <= describe().free_memory_bytes


def test_nothing_is_tried_where_it_fits(monkeypatch):
    spec = Train.read({"steps": 10})
    monkeypatch.setattr(Train, "override", lambda *_: pytest.fail("tried"))
    plan = spec.plan({"data": DATA}, describe())
    assert spec.with_ways(plan, {"data": DATA}, describe()) is plan


def test_other_stages_try_theirs(tiny_llama, monkeypatch):
    facts = {"model": CheckpointFacts.of(tiny_llama), "data": DATA}
    spec = Eval.read({})
    before = spec.plan(facts, describe()).estimates[MEMORY].value
    (first, *_) = ways(spec, facts, monkeypatch, 0.9)
    assert first.startswith("batch_tokens ") and checked(spec, facts, first) < before
    monkeypatch.undo()
    spec = Compress.read({"steps": [{"kind": "gptq", "group_size": 0}], "num_sequences": 64, "batch_size": 1})
    found = ways(spec, facts, monkeypatch, 0.5)
    assert not any("batch_size" in said for said in found)
    assert "compute on another device" in found
