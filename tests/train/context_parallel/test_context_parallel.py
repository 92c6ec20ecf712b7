"""Context parallelism in training, on gloo: every technique trains as one process does, alone and with every data parallelism."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.base.run import Run
from hone.cost.dims import ModelDims
from hone.cost.train.context import Sizes
from hone.measure.machine import describe
from hone.model.hf import load
from hone.train import CONTEXT_PARALLEL
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from tests.parallel.context_ranks import LENGTH, moved_bytes
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.data_parallel.test_data_parallel import on_ranks, weights_of
from tests.train.ranks import made, trained

ROPE = {"scaling": "dynamic", "factor": 2.0, "original_max_seq_len": 24}
DYNAMIC = {"kind": "attention", "rope": ROPE}
"""Frequencies that depend on the length of the whole sequence."""
LATENT = {"kind": "mla", "latent_dim": 24, "rope_dim": 8, "head_dim": 12, "value_dim": 16}
SETTINGS: list[dict[str, Any]] = [
    {"model": {"num_layers": 2}, "validate": True},
    {"uneven": True, "gradient_accumulation_steps": 2, "activation_checkpointing": "sqrt"},
    {
        "model": {
            "mixers": [DYNAMIC, {"kind": "shared_kv", "rope": ROPE}, {"kind": "sliding_window", "window": 9}, LATENT]
        },
        "optimizer": "muon",
    },
    {"model": {"num_layers": 2}, "activation_checkpointing": "selective"},
]
HSDP = {"kind": "zero3", "data_parallel_replicate_degree": 2}


@pytest.fixture(scope="module")
def alone(data_folder, tmp_path_factory) -> tuple[list, list[dict[str, torch.Tensor]]]:
    """Losses and weights of one process, for every setting."""
    folder = tmp_path_factory.mktemp("alone")
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), SETTINGS)
    return losses, [weights_of(folder, number, 1)[0] for number in range(len(SETTINGS))]


LAYOUTS: dict[str, tuple[int, int, list[tuple[str, Any, tuple[int, ...]]]]] = {
    "cp2": (
        2,
        2,
        [("ring", "ddp", (0, 1, 2, 3)), ("all_gather", "zero1", (0, 1, 2, 3)), ("ulysses", "zero3", (0, 1, 2, 3))],
    ),
    "dp2xcp2": (4, 2, [("ring", "zero3", (1,)), ("all_gather", HSDP, (2, 3)), ("ulysses", "zero1", (0, 1))]),
    "cp4": (4, 4, [("ring", "zero2", (1, 2)), ("all_gather", "ddp", (2, 3)), ("ulysses", "ddp", (0, 2))]),
    "dp2xcp4": (8, 4, [("ring", HSDP, (0, 2)), ("all_gather", "zero2", (1,)), ("ulysses", "zero3", (3,))]),
}
"""Ranks, those that share a sequence, and the techniques on them with the places of their settings: two ranks have all of them,
more ranks each setting and each technique, and all mixers with each technique where four ranks share them."""


@pytest.mark.parametrize("tokens", [True, False], ids=["sequence", "plain"])
def test_it_trains_beside_tensor_parallelism(tokens, alone, data_folder, tmp_path):
    """Two ranks share each sequence, two more each layer, whose parts have half of the heads."""
    degrees = {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "enable_sequence_parallel": tokens}
    settings = [
        {**SETTINGS[0], "parallelism": {**degrees, "context_parallel": technique, "data_parallel": data}}
        for technique, data, _ in LAYOUTS["cp2"][2]
    ]
    for found in on_ranks(4, trained, str(data_folder), str(tmp_path), settings):
        for ours in found:
            for mine, theirs in zip(ours, alone[0][0], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=2e-6, atol=2e-6)
    for number, setting in enumerate(settings):
        ranks = weights_of(tmp_path, number, 4)
        for name, whole in alone[1][0].items():
            assert all(torch.equal(one[name], ranks[0][name]) for one in ranks), f"ranks differ: {name}"
            assert (ranks[0][name] - whole).abs().max() <= 2e-6, f"{setting} {name}"


@pytest.mark.parametrize("layout", ["cp2", "dp2xcp2", "cp4", pytest.param("dp2xcp4", marks=pytest.mark.slow)])
def test_it_trains_as_one_process_does(layout, alone, data_folder, tmp_path):
    (num_ranks, degree, layouts), (losses, weights) = LAYOUTS[layout], alone
    places = [place for *_, those in layouts for place in those]
    settings = [
        {**SETTINGS[place], "context_parallel": technique, "context_parallel_degree": degree, "data_parallel": data}
        for technique, data, those in layouts
        for place in those
    ]
    for found in on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), settings):
        for ours, place in zip(found, places, strict=True):
            for mine, theirs in zip(ours, losses[place], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=2e-6, atol=2e-6)
    for number, (setting, place) in enumerate(zip(settings, places, strict=True)):
        ranks = weights_of(tmp_path, number, num_ranks)
        for name, whole in weights[place].items():
            assert all(torch.equal(one[name], ranks[0][name]) for one in ranks), f"ranks differ: {name}"
            assert (ranks[0][name] - whole).abs().max() <= 2e-6, f"{setting} {name}"


def test_checkpoints_do_not_know_of_it(data_folder, tmp_path):
    """One written by ranks that share sequences is read by one process, and the other way round."""
    ring = {"context_parallel": "ring", "context_parallel_degree": 2, "data_parallel": "zero2"}
    first, second = str(tmp_path / "shared"), str(tmp_path / "one")
    on_ranks(4, trained, str(data_folder), str(tmp_path), [{**ring, "until": 1, "write": first}])
    [[*whole]] = on_ranks(
        1, trained, str(data_folder), str(tmp_path), [{}, {"read": first}, {"until": 1, "write": second}]
    )
    final = weights_of(tmp_path, 0, 1)[0]
    settings = [{**ring, "context_parallel": "ulysses", "read": folder} for folder in (first, second)]
    found = on_ranks(2, trained, str(data_folder), str(tmp_path), settings)[0]
    for steps in (whole[1], *found):
        assert steps == [pytest.approx(whole[0][-1], rel=2e-5)]
    for one in (weights_of(tmp_path, 1, 1)[0], *(weights_of(tmp_path, number, 2)[0] for number in (0, 1))):
        assert all((one[name] - final[name]).abs().max() <= 5e-6 for name in final)


SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 4,
    "validation": {"interval": 3, "sequences": 7},
    "checkpoint": {"interval": 2},
    "optimizer": {"lr": 1e-3, **STEADY},
    "parallelism": {"data_parallel": "zero3", "context_parallel_degree": 2, "context_parallel": "all_gather"},
}


def test_the_stage_on_ranks_that_share_sequences(data_folder, tmp_path):
    """A rank is killed, and another layout ends with the figures of one process."""
    alone = {**SPEC, "parallelism": {}}
    one = Train.read(alone).make(tmp_path / "one", {"data": Artifact.read(data_folder)}, Run(quiet=True))
    ended = together(4, made, SPEC, str(data_folder), str(tmp_path / "two"), 3)
    assert ended[1].returncode == -signal.SIGKILL
    assert all("lost" in ended[rank].result for rank in (0, 2, 3))
    on_ranks(2, made, {**SPEC, "parallelism": {"context_parallel_degree": 2}}, str(data_folder), str(tmp_path / "two"))
    two = Artifact.read(tmp_path / "two")
    two.verify()
    ours, theirs = load(two.folder).state_dict(), load(one.folder).state_dict()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)
    logs = [read_jsonl(artifact.folder / "steps.jsonl") for artifact in (two, one)]
    assert any("val_loss" in row for row in logs[1])
    for mine, other in zip(*logs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert two.fingerprint == one.fingerprint
    assert "ddp, 2 ranks share each sequence (ring)" in two.figures["num_ranks"].note


def test_a_student_and_its_teacher_share_sequences(data_folder, tmp_path):
    parents = {"data": Artifact.read(data_folder)}
    short = {name: value for name, value in SPEC.items() if name != "parallelism"} | {"steps": 2}
    parents["teacher"] = Train.read(short).make(tmp_path / "teacher", parents, Run(quiet=True))
    student = {**short, "objective": "distill", "seed": 5}
    one = Train.read(student).make(tmp_path / "one", parents, Run(quiet=True))
    shared = {**student, "parallelism": SPEC["parallelism"]}
    on_ranks(2, partial(made, teacher=str(tmp_path / "teacher")), shared, str(data_folder), str(tmp_path / "two"))
    ours, theirs = load(tmp_path / "two").state_dict(), load(one.folder).state_dict()
    assert all((ours[name] - theirs[name]).abs().max() <= 2e-6 for name in theirs)


def test_the_estimates_count_every_byte():
    """What the ranks receive, counted in their calls, is what the plan says."""
    dims = SHAPE.config(256).dims()
    for num_ranks in (2, 4):
        ended = on_ranks(num_ranks, moved_bytes)
        for technique, (forward, backward) in ended[0].items():
            sizes = Sizes.of(dims, 2 * LENGTH // num_ranks, LENGTH, num_ranks, 4)
            said = CONTEXT_PARALLEL.read(technique).cost().moved(sizes._replace(layers=sizes.layers[:1]))
            assert said[:2] == (pytest.approx(forward), pytest.approx(backward)), technique


def test_state_is_sharded_over_context_parallel_ranks_too():
    found = {}
    for name in ("ddp", "zero2", HSDP):
        shared = Parallelism.read({"data_parallel": name, "context_parallel_degree": 4})
        divided = shared.divided(8)
        found[str(name)] = divided.num_ranks, divided.num_shards
        assert shared.degrees(8).dp == 2 and shared.sequences(6, 3, 8) == 1
    assert list(found.values()) == [(8, 1), (8, 8), (8, 4)]


def test_what_each_layer_sends():
    shape = SHAPE.model_copy(update=SETTINGS[2]["model"])
    sizes = Sizes.of(shape.config(256).dims(), 64, 32, 2, 4)
    assert [one.keys for one in sizes.layers] == [48, 48, 48, 4 * (12 + 8) + 4 * 16]  # shared keys go around again
    assert [one.queries for one in sizes.layers] == [48, 48, 48, 4 * (12 + 8)]
    assert [one.num_kv_heads for one in sizes.layers] == [2, 2, 2, 4]


def test_which_technique_costs_what():
    """Llama-3 8B, 131,072 tokens on 8 ranks: Ulysses moves least, a ring keeps least, and only a ring hides its transfers."""
    dims = ModelDims.uniform(
        num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256, max_seq_len=131072,
    )  # fmt: skip
    sizes = Sizes.of(dims, 131072 // 8, 131072, 8, 2)
    ways = {name: CONTEXT_PARALLEL.read(name).cost() for name in ("ring", "all_gather", "ulysses")}
    moved = {name: sum(way.moved(sizes)[:2]) for name, way in ways.items()}
    kept = {name: way.kept_bytes(sizes, "cuda") for name, way in ways.items()}
    assert moved["ulysses"] < moved["all_gather"] < moved["ring"]
    assert kept["ring"] < kept["all_gather"] and kept["ulysses"] < kept["all_gather"]
    assert sum(way.moved(sizes)[0] for way in (ways["ring"],)) == 32 * 7 * 16384 * 2048 * 2
    assert [name for name, way in ways.items() if way.overlaps] == ["ring"]


def test_what_cannot_be_shared_is_said(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    machine = describe("cpu").model_copy(update={"num_ranks": 4})

    def planned(num_ranks: int = 4, **changed: Any) -> Any:
        spec = {**SPEC, **changed}
        return Train.read(spec).plan(facts, machine.model_copy(update={"num_ranks": num_ranks}))

    with pytest.raises(SpecError, match="context_parallel_degree 2 does not divide 3 ranks"):
        planned(3)
    with pytest.raises(SpecError, match="a sequence of 34 tokens is not divisible into 4 chunks") as caught:
        planned(seq_len=34)
    assert "multiple of 4" in caught.value.fix
    with pytest.raises(SpecError, match="ulysses cannot divide 4 query heads among 8"):
        planned(8, parallelism={"context_parallel_degree": 8, "context_parallel": "ulysses"}, batch_size=8)
    both = {"context_parallel_degree": 2, "context_parallel": "ulysses", "tensor_parallel_degree": 4}
    with pytest.raises(SpecError, match="ulysses cannot divide 1 query heads among 2"):
        planned(8, parallelism=both, model={**SPEC["model"], "num_kv_heads": 4})
    with pytest.raises(
        SpecError, match="seq_len 36 is not divisible by context_parallel_degree 4 x tensor_parallel_de"
    ):
        planned(8, parallelism={"context_parallel_degree": 4, "tensor_parallel_degree": 2}, seq_len=36)
    with pytest.raises(SpecError, match="mixer 'linear_attention' of layer 0 does not run on parts of a sequence"):
        planned(model={**SPEC["model"], "mixers": ["linear_attention"]})
    with pytest.raises(SpecError, match="batch_size 3 is not divisible into 2 ranks"):
        planned(batch_size=3)
    plan, alone = planned(), planned(2, parallelism={})
    assert "of which all_gather" in plan.estimates["time_s"].formula
    assert "all_gather" in plan.estimates[MEMORY].formula
    assert "all_gather" not in alone.estimates["time_s"].formula
