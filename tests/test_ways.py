"""Ways out that a plan proposes were tried first: they change what is set, and need less memory."""

from __future__ import annotations

import re

import pytest

from hone.base.plan import MEMORY
from hone.compress.stage import Compress
from hone.eval.stage import Eval
from hone.feed.facts import DataFacts, SplitFacts
from hone.measure.machine import Machine, describe
from hone.model.facts import CheckpointFacts
from hone.train.stage import Train

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
    name, value = re.match(r"set ([\w.]+): (\w+), then it needs ", said).groups()
    assert str(getattr(spec, name)) != value
    return spec.override({name: value}).plan(facts, describe()).estimates[MEMORY].value


def test_what_is_proposed_fits(monkeypatch):
    spec = Train.read({"steps": 10, "batch_size": 16, "seq_len": 256})
    before = spec.plan({"data": DATA}, describe()).estimates[MEMORY].value
    found = ways(spec, {"data": DATA}, monkeypatch, 0.7)
    assert len(found) == 3 and found[0].startswith("set gradient_accumulation_steps: 2, then it needs ")
    assert all(checked(spec, {"data": DATA}, said) < before for said in found if said.startswith("set "))
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
    assert not any("gradient_accumulation_steps" in said or "full" in said or "seq_len:" in said for said in found)
    assert "use a smaller model" in found


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
    assert first.startswith("set batch_tokens: ") and checked(spec, facts, first) < before
    monkeypatch.undo()
    spec = Compress.read({"steps": [{"kind": "gptq", "group_size": 0}], "num_sequences": 64, "batch_size": 1})
    found = ways(spec, facts, monkeypatch, 0.5)
    assert not any("batch_size" in said for said in found)
    assert "compute on another device" in found
