"""Compressed gradients, local SGD and DiLoCo on gloo: each against its own definition, computed in one process."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.continuation.test_continuation import same_weights, steps_of
from tests.train.data_parallel.lossy_ranks import SHAPES, STEPS, gradients, summed
from tests.train.data_parallel.test_data_parallel import on_ranks, weights_of
from tests.train.ranks import BATCH, SEQ, made, made_in_turn, trained, trainer

ALGORITHMS = ("ring", "halving", "doubling", "tree")


def powersgd(num_ranks: int, columns: int) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Algorithms 1 and 2 of arXiv:1905.13727 for all ranks at once, in float64: (sums of each step, errors of all at the end)."""
    names = [name for name, shape in SHAPES.items() if len(shape) == 2 and columns * sum(shape) < np.prod(shape)]
    errors = {name: np.zeros((num_ranks, *SHAPES[name])) for name in names}
    starts = {}
    for name in names:
        draw = torch.Generator().manual_seed(sum(name.encode()))
        starts[name] = torch.randn(SHAPES[name][1], columns, generator=draw).double().numpy()
    found = []
    for step in range(STEPS):
        each = [gradients(rank, step) for rank in range(num_ranks)]
        sums = {name: sum(one[name] for one in each).double().numpy() for name in SHAPES}
        for name in names:
            moved = np.stack([one[name].double().numpy() for one in each]) + errors[name]
            basis, _ = np.linalg.qr(sum(part @ starts[name] for part in moved))
            factors = [part.T @ basis for part in moved]
            errors[name] = np.stack([part - basis @ factor.T for part, factor in zip(moved, factors, strict=True)])
            starts[name] = sum(factors)
            sums[name] = basis @ starts[name].T
        found.append(sums)
    return found, errors


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_compressed_sums_are_as_defined(num_ranks):
    kinds: list[Any] = [{"kind": "powersgd", "rank": 2}, "bf16_gradients"]
    kinds += [{"kind": "ddp", "all_reduce": name} for name in ALGORITHMS]
    results = on_ranks(num_ranks, summed, kinds)
    low_rank, rounded, *exact = zip(*results, strict=True)
    expected, errors = powersgd(num_ranks, 2)
    for rank, (steps, own) in enumerate(low_rank):
        assert steps == low_rank[0][0], "ranks differ"
        for step, theirs in zip(steps, expected, strict=True):
            for name, values in theirs.items():
                np.testing.assert_allclose(step[name], values, atol=2e-4)
        for name, values in errors.items():
            np.testing.assert_allclose(own[name], values[rank], atol=2e-4)
    kept = sum(np.asarray(own["a"]) for _, own in low_rank)
    given = sum(gradients(rank, step)["a"].numpy() for rank in range(num_ranks) for step in range(STEPS))
    np.testing.assert_allclose(kept + sum(np.asarray(step["a"]) for step in low_rank[0][0]), given, atol=1e-4)
    for step in range(STEPS):
        each = [gradients(rank, step) for rank in range(num_ranks)]
        for name in SHAPES:
            whole = sum(one[name] for one in each)
            short = torch.tensor(rounded[0][0][step][name])
            assert torch.equal(short, short.bfloat16().float()), "more than 8 significant bits"
            assert (
                0 < (short - whole).abs().max() <= 2**-8 * (num_ranks + 1) * sum(one[name].abs() for one in each).max()
            )
            if num_ranks == 2:  # one addition: rounded once more
                assert torch.equal(short, (each[0][name].bfloat16() + each[1][name].bfloat16()).float())
            for algorithm in exact:
                torch.testing.assert_close(torch.tensor(algorithm[0][0][step][name]), whole, atol=1e-6, rtol=1e-6)


SHORT: dict[str, Any] = {"model": {"num_layers": 2}, "steps": 3}
"""A step more than one period of the outer steps, which ends with a second one."""


def alone(data: PackedTokens, num_workers: int, every: int, lr: float, momentum: float) -> dict[str, torch.Tensor]:
    """Weights after all steps of workers that are trained one after the other, with torch's SGD as the outer step."""
    workers = [trainer(data, Mesh(), SHORT) for _ in range(num_workers)]
    common = {name: part.detach().clone() for name, part in workers[0].model.named_parameters()}
    options = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    outer = torch.optim.SGD(common.values(), **options)
    each = BATCH // num_workers
    for step in range(SHORT["steps"]):
        for number, worker in enumerate(workers):
            rows = np.arange(step * BATCH + number * each, step * BATCH + (number + 1) * each)
            worker.step(data.sequences(rows, SEQ, 0))
        if (step + 1) % every and step + 1 < SHORT["steps"]:
            continue
        with torch.no_grad():
            models = [dict(worker.model.named_parameters()) for worker in workers]
            for name, one in common.items():
                one.grad = one - torch.stack([model[name] for model in models]).mean(0)
            outer.step()
            for model in models:
                for name, one in common.items():
                    model[name].copy_(one)
    return common


LOCAL: list[tuple[dict[str, Any], tuple[float, float]]] = [
    ({"kind": "local_sgd", "sync_every": 2}, (1.0, 0.0)),
    ({"kind": "diloco", "sync_every": 1, "outer_lr": 0.5}, (0.5, 0.9)),
    ({"kind": "diloco", "sync_every": 2}, (0.7, 0.9)),
]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_local_sgd_equals_workers_in_one_process(num_ranks, data_folder, tmp_path):
    kinds = [{**kind, "num_workers": num_ranks} for kind, _ in LOCAL]
    others: list[dict[str, Any]] = [
        {"kind": "powersgd", "rank": 2},
        {"kind": "bf16_gradients"},
        {"kind": "zero_plus_plus"},
    ]
    resumed = [kinds[2], *({**kind, "num_workers": num_ranks} for kind in others)]
    settings = [{"data_parallel": kind} for kind in kinds] + [{"data_parallel": kind} for kind in resumed[1:]]
    whole = len(settings)
    for number, kind in enumerate(resumed):
        folder = str(tmp_path / f"kept{number}")
        settings += [{"data_parallel": kind, "until": 2, "write": folder}, {"data_parallel": kind, "read": folder}]
    on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), [{**SHORT, **one} for one in settings])
    torch.set_num_threads(1)
    for number, (kind, outer) in enumerate(LOCAL):
        theirs = alone(PackedTokens(data_folder), num_ranks, kind["sync_every"], *outer)
        for one in weights_of(tmp_path, number, num_ranks):
            for name, values in theirs.items():
                assert (one[name] - values).abs().max() <= 2e-6, f"{kind} {name}"
    for number in range(len(resumed)):
        through = weights_of(tmp_path, 2 + number, num_ranks)
        again = weights_of(tmp_path, whole + 2 * number + 1, num_ranks)
        for one, other in zip(through, again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one), resumed[number]


SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 4,
    "validation": {"interval": 2, "sequences": 7},
    "checkpoint": {"interval": 2},
    "optimizer": {"lr": 1e-3},
    "parallelism": {"data_parallel": {"kind": "diloco", "sync_every": 2}},
}


def test_a_killed_rank_ends_all_and_the_stage_resumes(data_folder, tmp_path):
    through = on_ranks(2, made, SPEC, str(data_folder), str(tmp_path / "one"))
    ended = together(2, made, SPEC, str(data_folder), str(tmp_path / "two"), 3)
    assert ended[1].returncode == -signal.SIGKILL
    assert "rank 0 lost" in ended[0].result and "the stage resumes" in ended[0].result
    assert on_ranks(2, made, SPEC, str(data_folder), str(tmp_path / "two")) == through
    exact = Train.read({**SPEC, "parallelism": {}})
    assert Train.read(SPEC).identity() != exact.identity(), "what changes the result is part of the identity"


LOSSY: list[dict[str, Any]] = [
    {"kind": "powersgd", "rank": 2},
    {"kind": "bf16_gradients"},
    {"kind": "local_sgd", "sync_every": 2},
    {"kind": "diloco", "sync_every": 2},
]


@pytest.mark.slow
def test_a_longer_training_has_the_bits_of_one_at_once(data_folder, tmp_path):
    """With the state that each rank has of its own: errors of compression, optimizer of a worker, outer velocity."""
    schedule = {"kind": "wsd", "warmup": 2, "decay": 0}
    runs = []
    for kind in LOSSY:
        half, more, once = (str(tmp_path / f"train-{kind['kind']}-{part}") for part in ("half", "more", "once"))
        spec = {**SPEC, "schedule": schedule, "parallelism": {"data_parallel": kind}, "validation": {"sequences": 0}}
        runs += [
            ({**spec, "checkpoint": {"interval": 2, "keep": "optimizer"}}, half, {}),
            ({**spec, "checkpoint": {"interval": 2, "load": "schedule"}, "steps": 8}, more, {"model": half}),
            ({**spec, "steps": 8}, once, {}),
        ]
    on_ranks(2, made_in_turn, str(data_folder), runs)
    for kind in LOSSY:
        more, once = (Artifact.read(tmp_path / f"train-{kind['kind']}-{part}") for part in ("more", "once"))
        assert same_weights(more, once) and steps_of(more) == steps_of(once)[4:], kind


def test_what_does_not_work_is_said(data_folder):
    def read(kind: Any, **others: Any) -> Train:
        return Train.read({**SPEC, **others, "parallelism": {"data_parallel": kind}})

    with pytest.raises(SpecError, match=r"validation\.interval 2 is no multiple of the 3 steps"):
        read({"kind": "local_sgd", "sync_every": 3})
    with pytest.raises(SpecError, match=r"early_stopping\.interval 20 is no multiple of the 3 steps"):
        read(
            {"kind": "local_sgd", "sync_every": 3},
            validation={},
            checkpoint={"interval": 3},
            early_stopping={"val_loss": 2},
        )
    with pytest.raises(SpecError, match="powersgd works in bf16, fp32, not in fp16"):
        read("powersgd", precision="fp16")
    with pytest.raises(SpecError, match="bf16_gradients works with data-parallel ranks only"):
        Train.read({**SPEC, "parallelism": {"data_parallel": "bf16_gradients", "tensor_parallel_degree": 2}})
    facts = {"data": facts_of(Artifact.read(data_folder))}
    machine = describe("cpu").model_copy(update={"num_ranks": 4})
    with pytest.raises(SpecError, match="diloco is set to 2 ranks, and 4 started") as caught:
        Train.read(SPEC).plan(facts, machine)
    assert "set parallelism.data_parallel.num_workers to 4" in caught.value.fix


def test_what_travels_and_what_is_kept():
    from hone.train import DATA_PARALLEL

    dims = SHAPE.config(256).dims()
    ddp = DATA_PARALLEL.read("ddp").divided(2)

    def divided(kind: Any) -> Any:
        return DATA_PARALLEL.read(kind).divided(2)

    seconds = {kind: divided(kind).step_s(dims, "float32", 1, "cpu") for kind in ("ddp", "bf16_gradients", "powersgd")}
    assert seconds["ddp"] > seconds["bf16_gradients"]
    rarely, often = divided({"kind": "diloco", "sync_every": 20}), divided({"kind": "diloco", "sync_every": 10})
    assert often.step_s(dims, "float32", 1, "cpu") == pytest.approx(2 * rarely.step_s(dims, "float32", 1, "cpu"))
    params = dims.num_params
    assert rarely.weights_bytes(dims, 4) - ddp.weights_bytes(dims, 4) == 8 * params
    assert divided("local_sgd").weights_bytes(dims, 4) - ddp.weights_bytes(dims, 4) == 4 * params
