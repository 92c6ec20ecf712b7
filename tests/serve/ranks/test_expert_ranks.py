"""Experts on several ranks: cut by width or divided whole, with copies, placed by loads and moved while requests run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.facts import CheckpointFacts
from hone.model.parallel.experts import even_slots
from hone.model.parallel.reading import LocalCheckpoint, random_model
from hone.parallel.group import Group
from hone.parallel.place import Place
from hone.serve.planning import of_a_rank
from hone.serve.spec import EngineSpec
from tests.forking import forking
from tests.model.parallel.quantized_folder import write_quantized
from tests.model.parallel.test_reading import SCHEMES
from tests.serve.ranks.test_ranks import GREEDY, result
from tests.serve.small import decoder

MIXED = [
    {**GREEDY, "logprobs": 2},
    {**GREEDY, "max_tokens": 9},
    {"max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True, "repetition_penalty": 1.2},
    {**GREEDY, "max_tokens": 16},
]
SHARED = {"num_shared_experts": 2, "shared_gate": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "router": {"kind": "softmax", "top_k": 2}},
    "qwen3_moe": {"num_experts": 8, "router": {"kind": "softmax", "top_k": 3}},
    "qwen2_moe": {"num_experts": 8, "router": {"kind": "softmax", "top_k": 4, "normalize": False}, **SHARED},
}
EP = {"enable_expert_parallel": True}


def experts(family: str, **more: Any) -> Any:
    fed = {"kind": "moe", "intermediate_size": 24, **FAMILIES[family]}
    model = decoder(family=family, feed_forward=(fed,), tie_embeddings=False, **more)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() == 3:
                one.mul_(12.0)
    return model


@pytest.fixture(scope="module")
def call() -> Iterator[Any]:
    with forking("tests.serve.ranks.forked:call") as found:
        yield found


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, call, tmp_path_factory) -> tuple[Path, dict]:
    """A folder of each family, and what one process writes."""
    path = tmp_path_factory.mktemp(request.param)
    hf.save(experts(request.param), path)
    return path, result(call("write", path, {}, MIXED))


def assert_same(found: dict, alone: dict) -> None:
    assert found["tokens"] == alone["tokens"]
    assert found["scores"]["0"] == pytest.approx(alone["scores"]["0"], abs=1e-4)
    assert (found["used"], found["left"]) == (0, [])


@pytest.mark.parametrize(
    "spec",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, **EP}, {"tensor_parallel_size": 4, **EP}],
    ids=str,
)  # fmt: skip
def test_ranks_write_what_one_process_writes(call, model, spec: dict) -> None:
    folder, alone = model
    assert_same(result(call("write", folder, spec, MIXED)), alone)


def test_copies_stages_and_moves_change_no_token(call, model, tmp_path: Path) -> None:
    folder, alone = model
    count = even_slots(hf.Checkpoint(folder).config, 1)
    loads = {index: [1 + (7 * expert) % 5 for expert in range(len(own))] for index, own in count.items()}
    (tmp_path / "loads.json").write_text(json.dumps(loads))
    for spec in (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **EP},
        {"tensor_parallel_size": 2, **EP, "enable_eplb": True,
         "eplb_config": {"num_redundant_experts": 2, "loads": str(tmp_path / "loads.json"), "step_interval": 5}},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **EP, "enable_eplb": True,
         "eplb_config": {"num_redundant_experts": 2, "step_interval": 4}},
    ):  # fmt: skip
        assert_same(result(call("write", folder, spec, MIXED)), alone)


def test_moves_follow_what_tokens_ask_for(call, tmp_path: Path) -> None:
    hf.save(experts("qwen3_moe"), tmp_path / "model")
    spec = {"tensor_parallel_size": 2, **EP, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
    found = result(call("rebalance", tmp_path / "model", spec, MIXED))
    assert found["tokens"] == found["after"] == result(call("write", tmp_path / "model", {}, MIXED))["tokens"]
    assert found["visits"] == [found["computed"] * 3] * 2, "three experts a token, no padding"
    assert found["will"] < found["was"]
    assert re.match(r"experts of [12] of 2 layers move: the busiest rank has 1\.\d+ of the mean load", found["said"])
    assert found["slots"] != found["before"] and found["weights"], "weights are the slots' experts'"


@pytest.mark.parametrize("name", ["int4 in groups", "fp8 blocks"])
@pytest.mark.parametrize("spec", [{}, EP], ids=str)
def test_quantized_experts(call, tmp_path: Path, name: str, spec: dict) -> None:
    fed = {"kind": "moe", "intermediate_size": 64, "num_experts": 4, "router": {"kind": "softmax", "top_k": 2}}
    made = decoder(hidden_size=128, num_layers=1, family="mixtral", feed_forward=(fed,), tie_embeddings=False)
    folder = write_quantized(made, tmp_path / "model", *SCHEMES[name])
    wanted = result(call("write", folder, {}, [GREEDY] * 2))["tokens"]
    assert result(call("write", folder, {"tensor_parallel_size": 2, **spec}, [GREEDY] * 2))["tokens"] == wanted
    if spec:
        moving = {"tensor_parallel_size": 2, **EP, "enable_eplb": True, "eplb_config": {"step_interval": 3}}
        assert result(call("write", folder, moving, [GREEDY] * 2))["tokens"] == wanted
        found = result(call("rebalance", folder, {**moving, "eplb_config": {"num_redundant_experts": 2}}, MIXED))
        assert found["slots"] != found["before"] and found["weights"], "weights are the slots' experts'"
        assert found["tokens"] == found["after"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_experts_alone(tmp_path: Path, family: str, monkeypatch) -> None:
    whole = experts(family, num_layers=1)
    hf.save(whole, tmp_path)
    place, count = Place(1, 2, 0, 1), FAMILIES[family]["num_experts"]
    slots = even_slots(whole.config, 2, 2)
    source = LocalCheckpoint(tmp_path, place, Group(place), slots=slots)
    read, part = set(), source.weights.part
    monkeypatch.setattr(source.weights, "part", lambda name, index: read.add(name) or part(name, index), raising=False)
    taken = source.take
    monkeypatch.setattr(source, "take", lambda name, *more, **options: read.add(name) or taken(name, *more, **options))
    layer = source.build().layers[0].feed_forward
    own = slots[0][count // 2 + 1 :]
    assert torch.equal(layer.gate_up.weight, whole.layers[0].feed_forward.gate_up.weight[list(own)])
    assert torch.equal(layer.down.weight, whole.layers[0].feed_forward.down.weight[list(own)])
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert numbers == set(own)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "spec", [{}, EP, {**EP, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}], ids=str
)
def test_the_plan_takes_what_a_rank_holds(tmp_path: Path, family: str, spec: dict) -> None:
    whole = experts(family)
    hf.save(whole, tmp_path)
    engine, place = EngineSpec.read({"tensor_parallel_size": 2, **spec}), Place(0, 2, 0, 1)
    slots = even_slots(whole.config, 2, engine.eplb_config.num_redundant_experts) if spec else None
    held = LocalCheckpoint(tmp_path, place, Group(place), slots=slots).build()
    found = of_a_rank(engine, CheckpointFacts.of(tmp_path)).config
    # A rank's rows of the vocabulary are padded to a multiple.
    assert found.num_params == sum(one.numel() for one in held.parameters())
    drawn = [
        random_model(whole.config, Place(rank, 2, 0, 1), Group(Place(rank, 2, 0, 1)), slots=slots) for rank in range(2)
    ]
    routers, ups = (
        [getattr(one.layers[0].feed_forward, name).weight for one in drawn] for name in ("router", "gate_up")
    )
    assert (
        torch.equal(*routers)
        and not torch.equal(*ups)
        and held.layers[0].feed_forward.gate_up.weight.shape == ups[0].shape
    )


def test_what_does_not_go_together_is_said(call, tmp_path: Path) -> None:
    for fields, says in (
        ({"enable_expert_parallel": True}, "set engine.tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "enable_eplb": True}, "set engine.enable_expert_parallel"),
        ({"tensor_parallel_size": 2, **EP, "eplb_config": {"step_interval": 3}}, "no effect without enable_eplb"),
    ):
        with pytest.raises(SpecError, match=says):
            EngineSpec.read(fields)
    hf.save(experts("mixtral"), tmp_path / "moe")
    hf.save(decoder(), tmp_path / "dense")
    (tmp_path / "loads.json").write_text('{"0": [1, 2]}')
    redundant = {"tensor_parallel_size": 2, **EP, "enable_eplb": True}
    for folder, spec, says in (
        ("dense", {"tensor_parallel_size": 2, **EP}, "SpecError: the model has no experts"),
        (
            "moe",
            {**redundant, "eplb_config": {"num_redundant_experts": 1}},
            "SpecError: layer 0: 4 experts and 1 redundant",
        ),
        ("moe", {**redundant, "eplb_config": {"loads": str(tmp_path / "loads.json")}}, "SpecError: eplb_config.loads"),
        ("moe", {**redundant, "eplb_config": {"loads": str(tmp_path / "none.jsonl")}}, "SpecError: eplb_config.loads"),
    ):
        found = result(call("refuse", tmp_path / folder, spec))
        assert found["said"].startswith(says) and found["left"] == []
