"""Layers recomputed one by one: as few as memory asks for, never a slower plan, and what the recipe says is what a training does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from hone.base.errors import SpecError
from hone.cost.activations.segments import Segment
from hone.cost.train.figures import growth_bytes
from hone.plan.search.exact import simulated
from hone.plan.search.front import front
from hone.plan.search.goal import Goal
from hone.plan.search.recipes import recomputation
from hone.plan.search.searching import fleets_of, priced, search
from hone.plan.search.training.layers import ranks_of, refined, text_of, work_of
from hone.plan.search.ways import table_of
from hone.solvers.recomputation import least_recomputation
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.stage import Train

MODEL = {"hidden_size": 2048, "num_layers": 6, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 8192}
GOAL = {
    "goal": "train", "model": MODEL, "vocab_size": 32000, "seq_len": 4096, "batch_size": [32], "tokens": ["1B"], "weights": {"hours": 1},
    "machines": ["1xH100"], "memory": "25GB",
    "space": {"micro_batch": [16], "recomputation": ["every_nth 2", "full"], "precision": ["bf16"]},
}  # fmt: skip
PIPED = {
    **GOAL, "model": {**MODEL, "num_layers": 8}, "machines": ["4xH100"], "memory": "16GB",
    "space": {**GOAL["space"], "micro_batch": [4], "pipeline_parallel": [4], "tensor_parallel": [1], "schedules": ["1f1b"], "data_parallel": ["ddp"]},
}  # fmt: skip


def full_of(goal: Goal):
    """The plan of the way that recomputes all layers."""
    ways, _ = priced(goal, fleets_of(goal))
    (way,) = (way for way in ways if way.train["recomputation"] == "full")
    return simulated(way, goal)


def test_as_few_layers_are_recomputed_as_the_memory_asks_for():
    """By brute force over all sets of layers with the estimate of memory that the plan shows."""
    goal = Goal.read(GOAL)
    way = full_of(goal)
    work = work_of(way, goal)
    found = least_recomputation(ranks_of(work, way), work.gradient_accumulation_steps)

    def fits(layers) -> bool:
        segments = tuple(Segment(layer, layer + 1, layer in layers) for layer in range(6))
        return growth_bytes(replace(work, segments=segments), "cuda").value <= way.fleet.memory_bytes

    assert found is not None and 0 < len(found) < 6 and fits(found)
    fewer = [layers for count in range(len(found)) for layers in combinations(range(6), count)]
    assert not any(fits(layers) for layers in fewer)
    better = refined(way, goal, simulated)
    assert better.train["recomputation"] == text_of(found, 6) and better.step_s < way.step_s
    assert way.train_bytes < better.train_bytes <= way.fleet.memory_bytes
    assert recomputation(better.train["recomputation"]) == {"kind": "layers", "layers": list(found)}


def test_stages_that_hold_fewer_micro_batches_recompute_fewer_layers():
    goal = Goal.read(PIPED)
    full = full_of(goal)
    better = refined(full, goal, simulated)
    assert better.step_s < full.step_s and better.train_bytes <= full.fleet.memory_bytes
    layers = recomputation(better.train["recomputation"])["layers"]
    assert layers and 7 not in layers, "the last stage has one micro-batch in memory, the first four"


def test_a_search_with_layers_is_as_good_as_one_without():
    rules, exact = (
        search(
            Goal.read({**GOAL, "space": {**GOAL["space"], "recomputation": [*GOAL["space"]["recomputation"], *more]}})
        )
        for more in ((), ("layers",))
    )
    assert exact.chosen.step_s < rules.chosen.step_s and "layers" in exact.chosen.label()
    values, halves, groups = table_of([*exact.ways, *rules.ways])
    assert front(values, halves, groups)[0]
    stage = next(one for one in exact.chosen.recipe(exact.goal, "x")["stages"] if one["stage"] == "train")
    assert stage["activation_checkpointing"]["kind"] == "layers"


@pytest.mark.parametrize(
    ("layers", "text"), [((), "none"), ((0, 1, 2, 3), "full"), ((0, 1), "layers 0-1"), ((1, 3), "layers 1,3")]
)
def test_the_name_of_a_choice_says_its_layers(layers, text):
    assert text_of(layers, 4) == text
    technique = ACTIVATION_CHECKPOINTINGS.read(recomputation(text))
    assert [one.start for one in technique.segments(4) if one.recompute] == list(layers)


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(SpecError, match="has 4, and the model has the layers 0 to 3"):
        ACTIVATION_CHECKPOINTINGS.read({"kind": "layers", "layers": [0, 4]}).segments(4)
    for wrong in ([-1], [1, 1]):
        with pytest.raises(SpecError, match="each once"):
            ACTIVATION_CHECKPOINTINGS.read({"kind": "layers", "layers": wrong})
    with pytest.raises(SpecError, match="lists none"):
        Train.read({"activation_checkpointing": "layers"})
    with pytest.raises(SpecError, match="add full"):
        Goal.read({**GOAL, "space": {"recomputation": ["layers"]}})
