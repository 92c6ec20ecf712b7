"""Expert parallelism on gloo: every router and layout trains as one process with as many micro-batches does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.hf import load
from hone.train.checkpoint import Checkpoints
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import assert_same_weights, handed_over, on_ranks, weights_of
from tests.train.expert_parallel.expert_ranks import crowded, held, kept
from tests.train.ranks import made, trained

MOE: dict[str, Any] = {"kind": "moe", "num_experts": 4, "intermediate_size": 32}
SHARED = {
    **MOE,
    "router": "sigmoid",
    "num_shared_experts": 1,
    "shared_gate": True,
    "balance": ["bias", "sequence_loss"],
}
SWITCH = {**MOE, "router": "switch", "capacity_factor": 1.25, "jitter": 0.01, "balance": ["aux_loss", "z_loss"]}
GSHARD = {**MOE, "router": "gshard", "capacity_factor": 1.0, "balance": ["aux_loss"]}
PROBS = {**MOE, "num_experts": 8, "capacity_factor": 0.5, "token_drop_policy": "probs", "num_shared_experts": 2}
CASES: list[dict[str, Any]] = [
    *({"model": {"num_layers": 2, "feed_forward": [one]}} for one in (SHARED, SWITCH, GSHARD, PROBS)),
    *({"model": {"num_layers": 2, "feed_forward": [{**MOE, "router": one}, "swiglu"]}} for one in ("hash", "expert_choice", "soft")),
    {"model": {"num_layers": 2, "feed_forward": [SHARED]}, "optimizer": "muon", "activation_checkpointing": "full"},
    {"model": {"num_layers": 2, "feed_forward": [MOE]}, "uneven": True, "validate": True, "activation_checkpointing": "selective"},
    {"model": {"num_layers": 2, "feed_forward": [{**MOE, "biases": True, "swiglu_limit": 0.5}, {**MOE, "router": "hash"}]}, "activation_checkpointing": "full"},
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the number of micro-batches, each as large as a rank's: losses and weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    settings = [{**one, "gradient_accumulation_steps": count} for count in (2, 4) for one in CASES]
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), settings)
    weights = [weights_of(folder, number, 1)[0] for number in range(len(settings))]
    count = len(CASES)
    return {2: (losses[:count], weights[:count]), 4: (losses[count:], weights[count:])}


def check(found: Any, folder: Path, num_ranks: int, alone: Any, places: Any) -> None:
    losses, weights = alone
    for rank in found:
        for ours, place in zip(rank, places, strict=True):
            for mine, theirs in zip(ours, losses[place], strict=True):  # a step's numbers, or a validation's loss
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=2e-6, atol=2e-6)
    for number, place in enumerate(places):
        for one in weights_of(folder, number, num_ranks):
            assert_same_weights(one, weights[place], "adamw")


@pytest.mark.parametrize("data_parallel", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_divide_the_experts(data_parallel: str, alone: Any, data_folder: Path, tmp_path: Path) -> None:
    shared = {"data_parallel": data_parallel, "parallelism": {"expert_parallel_degree": 2}}
    found = on_ranks(2, trained, str(data_folder), str(tmp_path), [{**one, **shared} for one in CASES])
    check(found, tmp_path, 2, alone[2], range(len(CASES)))


HSDP = {"kind": "zero2", "data_parallel_replicate_degree": 2}
RING = {"context_parallel": "ring", "context_parallel_degree": 2, "gradient_accumulation_steps": 2}
FOUR: list[dict[str, Any]] = [
    *({"data_parallel": one, "parallelism": {"expert_parallel_degree": 2}} for one in ("ddp", "zero1", "zero2", "zero3", HSDP)),
    *({"data_parallel": one, "parallelism": {"expert_parallel_degree": 4}} for one in ("ddp", "zero3")),
]  # fmt: skip


def test_four_ranks_in_every_mesh(alone: Any, data_folder: Path, tmp_path: Path) -> None:
    """Two of four cases a layout, each case in layouts of both degrees: two ranks have all of them, with every technique."""
    cases = (0, 3, 7, 8)
    places = [cases[at % 2 :: 2] for at in range(len(FOUR))]
    settings = [{**CASES[place], **layout} for layout, mine in zip(FOUR, places, strict=True) for place in mine]
    shared = [
        {**CASES[8], **RING, "parallelism": {"expert_parallel_degree": 2, "data_parallel": one}}
        for one in ("ddp", "zero3")
    ]
    found = on_ranks(4, trained, str(data_folder), str(tmp_path), [*settings, *shared])
    check(found, tmp_path, 4, alone[4], [*(place for mine in places for place in mine), 8, 8])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_pipeline_stages_divide_their_experts(schedule: str, data_folder: Path, tmp_path: Path) -> None:
    """Two stages of two ranks that divide the experts, with `zero1` over these; the checkpoint has the biases of all layers."""
    setting = {**CASES[0], "gradient_accumulation_steps": 4, "validate": True}
    setting["model"] = {"num_layers": 4, "tie_embeddings": False, "feed_forward": ["swiglu", SHARED]}
    [losses] = on_ranks(1, trained, str(data_folder), str(tmp_path), [{**setting, "gradient_accumulation_steps": 8}])
    shared = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, "expert_parallel_degree": 2}
    settings = [{**setting, "parallelism": {**shared, "data_parallel": one}} for one in ("ddp", "zero1")]
    settings[1] |= {"write": str(tmp_path / "kept")}
    found = on_ranks(4, trained, str(data_folder), str(tmp_path), settings)
    check(found, tmp_path, 4, (losses, weights_of(tmp_path, 0, 1)), [0, 0])
    stored = Checkpoints(tmp_path / "kept").newest()
    assert stored is not None and stored[1]["router_bias"].keys() == {"1", "3"}


def test_what_is_saved_is_read_to_the_bit(data_folder: Path, tmp_path: Path) -> None:
    """Weights, in every layout, of a training that four ranks saved in parts of experts."""
    setting = {**CASES[0], "optimizer": "muon", "until": 1}
    written = {**setting, **FOUR[1], "write": str(tmp_path / "kept")}
    on_ranks(4, trained, str(data_folder), str(tmp_path), [written])
    whole = weights_of(tmp_path, 0, 4)[0]
    for count, layouts in (
        (1, [{}]),
        (2, [{"data_parallel": "zero3"}, EP2, {**EP2, "data_parallel": "zero3"}]),
        (4, FOUR[-2:]),
    ):
        on_ranks(
            count,
            trained,
            str(data_folder),
            str(tmp_path),
            [{**setting, **one, "read": written["write"]} for one in layouts],
        )
        for number in range(len(layouts)):
            for found in weights_of(tmp_path, number, count):
                assert all(torch.equal(found[name], one) for name, one in whole.items())


def test_a_rank_holds_and_computes_its_experts_alone(data_folder: Path, tmp_path: Path) -> None:
    """And sends no more than the rows that the other's experts take, and what its own made of the other's: forward and backward."""
    for experts, sent, rows in on_ranks(2, held, str(data_folder)):
        assert experts == [[2, 2 * 32, 48], [2, 48, 32]]
        assert sent == 2 * 48 * 4 * rows > 0


def test_gradients_of_experts_that_one_rank_alone_has_stay_as_they_are(data_folder: Path) -> None:
    """No float32 copy of them is made where a step is one pass; what follows from them is the same."""
    for (steps, dtypes), (wide, others) in on_ranks(2, kept, str(data_folder)):
        assert dtypes == ["torch.bfloat16"] and others == ["torch.float32"]
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(wide), rtol=1e-6, atol=1e-6)


def test_a_rank_whose_experts_no_token_chooses() -> None:
    """It has no rows, its experts no gradient; biases, the clamped gate and fp8's scales are those of one process."""
    precisions = ["fp32", "fp8", "fp8_rowwise_with_gw_hp"]
    [alone] = on_ranks(1, crowded, precisions)
    ranks = on_ranks(2, crowded, precisions)
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert whole[-1] == first[-1] == [2 * 4 * 16] and second[-1] == [0]
        for one, mine, other in zip(whole[:-1], first[:-1], second[:-1], strict=True):
            found = torch.cat([torch.tensor(mine), torch.tensor(other)])
            torch.testing.assert_close(found, torch.tensor(one), rtol=1e-5, atol=1e-6)
        assert not any(torch.tensor(one).any() for one in second[2:-1])


def test_the_stage_trains_saves_and_resumes(data_folder: Path, tmp_path: Path) -> None:
    model = {**SHAPE.model_dump(), "num_layers": 2, "feed_forward": [SHARED]}
    spec = {"model": model, "batch_size": 4, "seq_len": 32, "steps": 4, "checkpoint": {"interval": 2}}
    spec["parallelism"] = {"data_parallel": "zero2", "expert_parallel_degree": 2}
    contents = on_ranks(2, made, spec, str(data_folder), str(tmp_path / "train-experts"))
    assert contents[0] == contents[1] and "error" not in contents[0]
    found = load(tmp_path / "train-experts")
    assert found.layers[0].feed_forward.gate_up.weight.shape == (4, 2 * 32, 48)


@pytest.mark.parametrize(
    ("parallelism", "moe", "said"),
    [
        ({}, "swiglu", "divides experts, and no layer has any"),
        ({}, {**MOE, "num_experts": 3}, "feed_forward.gate_up has 3 experts, which 2 expert-parallel ranks do not divide evenly"),
        ({"data_parallel": "local_sgd"}, MOE, "local_sgd works with data-parallel ranks only"),
        ({"data_parallel": {"kind": "zero3", "reshard_after_forward": 2}}, MOE, "reshard_after_forward default, always or never"),
        ({"data_parallel": "zero2", "offload": "host"}, MOE, "works with data-parallel ranks .zero1, zero2, zero3. and context"),
    ],
)  # fmt: skip
def test_what_does_not_work_says_so(parallelism: dict[str, Any], moe: Any, said: str) -> None:
    config = SHAPE.model_copy(update={"feed_forward": (moe,)}).config(64)
    with pytest.raises(SpecError, match=said):
        Parallelism.read({"expert_parallel_degree": 2, **parallelism}).check(config, seq_len=32)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"optimizer": "adafactor"}, "adafactor keeps states of whole stacks of experts"),
        ({"optimizer": "soap"}, "soap keeps states of whole stacks of experts"),
        (
            {"checkpoint": {"check": {"rerun_interval": 5}}},
            "check.rerun_interval compares gradients of the same experts",
        ),
    ],
)
def test_a_training_that_needs_whole_stacks_says_so(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Train.read({"parallelism": {"expert_parallel_degree": 2}, **more})


EP2: dict[str, Any] = {"parallelism": {"expert_parallel_degree": 2}}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"data_parallel": "ddp"}),
    (2, {"data_parallel": "zero3"}),
    (2, {"data_parallel": "ddp", "expert_parallel_degree": 2}),
    (2, {"data_parallel": "zero3", "expert_parallel_degree": 2}),
    (4, {"data_parallel": "zero2", "expert_parallel_degree": 2}),
    (4, {"data_parallel": "zero1", "expert_parallel_degree": 4}),
]


@pytest.mark.parametrize(
    ("optimizer", "apart"),
    [
        ("muon", 1),
        *(pytest.param(name, place, marks=pytest.mark.slow) for name, place in (("adamw_8bit", 2), ("lion", 3))),
    ],
)
def test_every_layout_reads_the_checkpoints_of_every_other(
    optimizer: str, apart: int, data_folder: Path, tmp_path: Path
) -> None:
    """Every pair of layouts under one of the optimizers, with fewer layers and experts than they have in the layouts' own test."""
    model = {"num_layers": 1, "feed_forward": [{**MOE, "num_shared_experts": 1, "balance": ["bias"]}]}
    layouts = [
        (count, {"parallelism": one, "optimizer": optimizer, "model": model, "gradient_accumulation_steps": 2})
        for count, one in LAYOUTS
    ]
    count = len(LAYOUTS)
    pairs = [(one, other) for one in range(count) for other in range(count) if (one - other) % 3 == apart % 3]
    (whole, final), *found = handed_over(layouts, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=2e-5)
        assert_same_weights(weights, final, optimizer)
