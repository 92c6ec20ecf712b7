"""What a plan says of divided experts: what a rank holds, and what it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hone.base.artifact import Artifact
from hone.base.plan import MEMORY, facts_of
from hone.cost.cache import BYTES
from hone.cost.ranks import Transfers
from hone.measure.machine import describe
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from tests.train.conftest import SHAPE

MOE: dict[str, Any] = {
    "kind": "moe",
    "num_experts": 8,
    "intermediate_size": 32,
    "router": {"kind": "softmax", "top_k": 3},
}
CONFIG = SHAPE.model_copy(update={"feed_forward": (MOE, "swiglu"), "num_layers": 4}).config(512)


def shared(**parallelism: Any) -> tuple[Parallelism, Any, Any]:
    """The parallelism, its division on eight ranks, and the dimensions of a rank's part."""
    from hone.train.optimizers.adamw import AdamW

    found = Parallelism.read(parallelism)
    part = found.shared(CONFIG, lambda dims: AdamW().cost(dims, "float32", "cpu"), 1, 32).tensor.dims
    return found, found.with_experts(found.divided(8), CONFIG), part or CONFIG.dims()


def test_a_rank_holds_its_experts_and_its_share_of_the_state() -> None:
    experts = 2 * 8 * 3 * 32 * SHAPE.hidden_size
    for kind in ("ddp", "zero1", "zero2", "zero3"):
        _, divided, part = shared(data_parallel=kind, expert_parallel_degree=4)
        assert part.num_params == CONFIG.num_params - experts * 3 // 4
        wanted = part.num_params if kind == "ddp" else CONFIG.num_params / 8  # all ranks together have one copy
        assert part.num_params / divided.of("optimizer") == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_gradients_of_experts_travel_between_their_copies_alone(kind: str) -> None:
    """Against the same model's with all experts on every rank: what is not of experts sends the same bytes."""
    experts = 2 * 8 * 3 * 32 * SHAPE.hidden_size
    _, whole, dims = shared(data_parallel=kind)
    for degree, copies in ((2, 4), (4, 2), (8, 1)):
        _, divided, part = shared(data_parallel=kind, expert_parallel_degree=degree)
        less = whole.sent_bytes(dims, 2, 1) - divided.sent_bytes(part, 2, 1)
        bytes_of = (
            4.0 * 2 if kind == "ddp" else 2.0 * {"zero3": 3}.get(kind, 2)
        )  # summed in float32; or in bf16, and gathered
        apart = bytes_of * experts * ((8 - 1) / 8 - (copies - 1) / copies / degree)
        assert less == pytest.approx(apart)


def test_rows_travel_there_and_back_and_so_do_their_gradients() -> None:
    rows, dims = Parallelism.read({"expert_parallel_degree": 4}).expert_rows, CONFIG.dims()
    one = 100 * 3 * SHAPE.hidden_size * 2 * 3 / 4  # tokens x visits x width x bf16, to three of four ranks
    assert rows.sent_bytes(dims, 100, BYTES["bfloat16"], micro_batches=2) == pytest.approx(2 * 2 * 4 * one)
    times = Transfers("cuda")
    plain, again = (
        rows.step_s(dims, 100, "bfloat16", times, micro_batches=1, recomputed=which) for which in ((), (0, 1))
    )
    assert plain == pytest.approx(2 * 4 * (5e-6 + one / 3e11)) and again == pytest.approx(plain * 10 / 8)


def test_the_plan_says_what_a_rank_needs(data_folder: Path) -> None:
    model = {**SHAPE.model_dump(), "num_layers": 2, "feed_forward": [{**MOE, "num_experts": 64}]}
    machine = describe("cpu").model_copy(update={"num_ranks": 4})
    facts, found = {"data": facts_of(Artifact.read(data_folder))}, []
    for degree in (1, 4):
        spec = {"model": model, "batch_size": 4, "seq_len": 32, "steps": 2}
        spec["parallelism"] = {"expert_parallel_degree": degree}
        found.append(Train.read(spec).plan(facts, machine))
    memory = [plan.estimates[MEMORY].value for plan in found]
    experts = 2 * 64 * 3 * 32 * SHAPE.hidden_size
    assert memory[0] - memory[1] > 0.7 * 16 * experts * 3 / 4  # weights, gradients and two moments
    assert found[0].estimates["num_params"].value == found[1].estimates["num_params"].value
    assert "transfers inside layers" in found[1].estimates["time_s"].formula
