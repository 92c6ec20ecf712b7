"""Experts whose matrices tensor-parallel ranks divide, alone and beside expert parallelism: training is that of one process, on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.parallel.axis import Axis
from hone.parallel.cut import Cut
from hone.parallel.experts import RowExchange
from hone.train.expert_parallel.decoder import exchange_rows
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from hone.train.tensor_parallel.decoder import TensorParallelDecoder
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import assert_same_weights, handed_over, on_ranks, weights_of
from tests.train.expert_parallel.test_expert_parallel import CASES, MOE, SHARED, check
from tests.train.ranks import trained

TENSOR = {"tensor_parallel_degree": 2}
PLAIN = {**TENSOR, "enable_sequence_parallel": False}
BOTH = {**TENSOR, "expert_parallel_degree": 2}


@pytest.fixture(scope="module")
def alone(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the number of micro-batches, each as large as a rank's: losses and weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    settings = [{**one, "gradient_accumulation_steps": count} for count in (1, 2) for one in CASES]
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), settings)
    weights = [weights_of(folder, number, 1)[0] for number in range(len(settings))]
    count = len(CASES)
    return {1: (losses[:count], weights[:count]), 2: (losses[count:], weights[count:])}


@pytest.mark.parametrize("parallelism", [TENSOR, PLAIN], ids=["tokens shared", "tokens whole"])
def test_two_ranks_divide_each_expert(
    parallelism: dict[str, Any], alone: Any, data_folder: Path, tmp_path: Path
) -> None:
    """Every router, balance, capacity and bias; of their losses each rank's gradient is a part."""
    found = on_ranks(
        2, trained, str(data_folder), str(tmp_path), [{**one, "parallelism": parallelism} for one in CASES]
    )
    check(found, tmp_path, 2, alone[1], range(len(CASES)))


LAYOUTS_OF_FOUR = [
    ("zero3", BOTH, range(len(CASES))),
    ("ddp", BOTH, (0, 1, 7, 9)),
    ("ddp", {**BOTH, **PLAIN}, (0, 1, 7, 9)),
    ("ddp", PLAIN, (0, 3, 7, 9)),
    ("zero1", BOTH, (0, 1, 7, 9)),
    ("zero2", {**BOTH, **PLAIN}, (0, 1, 7, 9)),
]


@pytest.mark.parametrize(("data_parallel", "parallelism", "places"), LAYOUTS_OF_FOUR)
def test_four_ranks_divide_experts_and_each_of_them(
    data_parallel: str, parallelism: dict[str, Any], places: Any, alone: Any, data_folder: Path, tmp_path: Path
) -> None:
    """Two that have other experts, or other sequences alone, times two that have other parts of each expert."""
    shared = {"data_parallel": data_parallel, "parallelism": parallelism}
    found = on_ranks(4, trained, str(data_folder), str(tmp_path), [{**CASES[one], **shared} for one in places])
    check(found, tmp_path, 4, alone[2], places)


@pytest.mark.parametrize("sequence", [True, False])
def test_pipeline_stages_divide_each_expert(sequence: bool, data_folder: Path, tmp_path: Path) -> None:
    """Two stages of two ranks, with `zero1`."""
    setting = {**CASES[0], "gradient_accumulation_steps": 4, "validate": True}
    setting["model"] = {"num_layers": 4, "tie_embeddings": False, "feed_forward": ["swiglu", SHARED]}
    [losses] = on_ranks(1, trained, str(data_folder), str(tmp_path), [setting])
    shared = {**TENSOR, "pipeline_parallel_degree": 2, "data_parallel": "zero1", "enable_sequence_parallel": sequence}
    found = on_ranks(4, trained, str(data_folder), str(tmp_path), [{**setting, "parallelism": shared}])
    check(found, tmp_path, 4, (losses, weights_of(tmp_path, 0, 1)), [0])


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, TENSOR),
    (2, {"data_parallel": "zero3", "expert_parallel_degree": 2}),
    (4, BOTH),
    (4, {**BOTH, "data_parallel": "zero3"}),
]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_every_layout_reads_the_checkpoints_of_every_other(optimizer: str, data_folder: Path, tmp_path: Path) -> None:
    """Parts of experts, of some experts, and parts of some experts become each other."""
    model = {"num_layers": 1, "feed_forward": [{**MOE, "num_shared_experts": 1, "biases": True, "balance": ["bias"]}]}
    layouts = [
        (count, {"parallelism": one, "optimizer": optimizer, "model": model, "gradient_accumulation_steps": 2})
        for count, one in LAYOUTS
    ]
    pairs = [
        (one, other)
        for one in range(len(LAYOUTS))
        for other in range(len(LAYOUTS))
        if 3 in (one, other) and one != other
    ]
    (whole, final), *found = handed_over(layouts, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=2e-5)
        assert_same_weights(weights, final, optimizer)


def test_a_part_of_a_part_is_cut_and_put_back() -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    cuts = [
        Cut((4, 6, 5), 0, ((2 * one, 2 * one + 2),), Cut((2, 6, 5), 1, ((other, other + 1), (3 + other, 5 + other))))
        for one in range(2)
        for other in range(1)
    ]
    made = torch.zeros_like(whole)
    for number, cut in enumerate(cuts):
        part = cut.take(whole)
        assert tuple(part.shape) == cut.local_shape == (2, 3, 5)
        assert torch.equal(part, whole[2 * number : 2 * number + 2][:, [0, 3, 4]])
        cut.put(part, made)
        assert Cut.read(json.loads(json.dumps(cut))) == cut
    assert torch.equal(made[:, [0, 3, 4]], whole[:, [0, 3, 4]]) and not made[:, [1, 2, 5]].any()
    assert Cut.read([[6], 0, [[1, 3]]]) == Cut((6,), 0, ((1, 3),))


@pytest.mark.parametrize("num_experts", [2, 4])
@pytest.mark.parametrize("optimizer", ["adafactor", "soap"])
def test_an_optimizer_that_needs_whole_stacks_says_so(optimizer: str, num_experts: int, data_folder: Path) -> None:
    """Where a token visits all experts, too."""
    moe = {**MOE, "num_experts": num_experts}
    spec = {"model": {**SHAPE.model_dump(), "feed_forward": [moe]}, "batch_size": 4, "seq_len": 32, "steps": 2}
    one = Train.read({**spec, "optimizer": optimizer, "parallelism": TENSOR})
    machine = describe("cpu").model_copy(update={"num_ranks": 2})
    with pytest.raises(SpecError, match=f"{optimizer} keeps states of whole stacks of experts"):
        one.plan({"data": facts_of(Artifact.read(data_folder))}, machine)


def test_a_rank_holds_its_part_of_its_experts() -> None:
    """The plan's numbers of weights are those of the rank's own decoder."""
    config = SHAPE.model_copy(update={"feed_forward": (MOE, "swiglu"), "num_layers": 4}).config(512)
    whole, parallelism = build(config, seed=1), Parallelism.read({**BOTH, "data_parallel": "zero1"})
    rows = RowExchange(Axis((0,), 0), None)  # type: ignore[arg-type]
    axes = (Axis((0, 1), 1, group=object()), Axis((0, 2), 1 - 1, group=object()))
    own = TensorParallelDecoder(whole, axes[0], experts=axes[1])
    exchange_rows(own, rows)
    assert tuple(own.layers[0].feed_forward.gate_up.weight.shape) == (2, 2 * 32 // 2, SHAPE.hidden_size)
    part = parallelism.shared(config, lambda dims: AdamW().cost(dims, "float32", "cpu"), 1, 32).tensor.dims
    assert part is not None and part.num_params == sum(one.numel() for one in own.parameters())
    divided = parallelism.with_experts(parallelism.divided(8), config)
    experts = 2 * 4 * 3 * 32 * SHAPE.hidden_size // 4
    assert divided.experts * config.num_layers == experts and divided.expert_ranks == 2
    assert divided.held == pytest.approx(part.num_params / (part.num_params + experts))
