"""Silent corruption: a rank that computes or holds other numbers than it should is named before the fault spreads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.parallel.pipeline.weight_gradients import WeightGradients
from hone.train.faults.rerun import Guard, check_replicas, recording
from hone.train.loop import Trainer, fit
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.faults.fault_ranks import faulty
from tests.train.test_ending import checkpoints_of

SPEC: dict[str, Any] = {
    "model": SHAPE.model_copy(update={"num_layers": 2}).model_dump(),
    "batch_size": 12,
    "gradient_accumulation_steps": 2,
    "seq_len": 32,
    "steps": 5,
    "validation": {"sequences": 4},
    "optimizer": {"lr": 1e-3, **STEADY},
}
CHECKS = {"rerun_interval": 2, "replicas_interval": 2}


def spec(check: dict[str, Any] | None = None, **parallelism: Any) -> dict[str, Any]:
    return {**SPEC, "checkpoint": {"interval": 0, "check": check or {}}, "parallelism": parallelism}


def results(num_ranks: int, *arguments: Any) -> list[str]:
    """What every rank returns."""
    ended = together(num_ranks, faulty, *arguments)
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr[-2000:] for one in ended)
    return [one.result for one in ended]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, {"data_parallel": "zero3"}),
        pytest.param(2, {"data_parallel": "zero1"}, marks=pytest.mark.slow),
        pytest.param(2, {"context_parallel_degree": 2}, marks=pytest.mark.slow),
        pytest.param(
            4, {"data_parallel": {"kind": "zero3", "data_parallel_replicate_degree": 2}}, marks=pytest.mark.slow
        ),
        pytest.param(4, {"tensor_parallel_degree": 2, "data_parallel": "zero1"}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline_parallel_degree": 2, "data_parallel": "zero1"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value)),
)
def test_without_a_fault_nothing_is_said_and_no_bit_changes(num_ranks, layout, data_folder, tmp_path, capfd):
    plain = results(num_ranks, spec(**layout), str(data_folder), str(tmp_path / "plain"))
    checked = results(num_ranks, spec({**CHECKS, "rerun_interval": 1}, **layout), str(data_folder), str(tmp_path / "x"))
    assert checked == plain and "corruption" not in capfd.readouterr().err


def test_weights_are_compared_before_an_evaluated_model_is_kept(data_folder, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(Guard, "stepped", lambda self, *, saves: seen.append((self.trainer.done, saves)))
    data = PackedTokens(data_folder)
    trainer = Trainer(build(SHAPE.config(data.vocab_size), seed=1), steps=3, schedule=Cosine(warmup=1))
    val, sizes = PackedTokens(data_folder, "val"), {"batch_size": 2, "seq_len": 32, "eval_sequences": 2}
    fit(trainer, data, val=val, eval_also=(2,), after_step=lambda one, _: seen.append(one.done), **sizes)
    assert seen == [(1, False), 1, (2, True), 2, (3, True), 3]


def test_states_that_tensor_parallel_ranks_have_whole_are_compared():
    def rank(index: int, row: float, meet: Callable[[dict[str, int]], Any]) -> Any:
        weights = SimpleNamespace(
            parameters={}, masters={"w": torch.full((4, 2), index)}, pieces={}, ready=lambda: None
        )
        states = {"w": {"row_var": torch.full((8, 1), row), "momentum": torch.full((4, 2), index)}}
        update = SimpleNamespace(weights=weights, states=states, cuts={"w"}, copies=lambda name: {"row_var"})
        grid = SimpleNamespace(tp=SimpleNamespace(index=index), ep=SimpleNamespace(index=0, size=1))
        return SimpleNamespace(update=update, ranks=SimpleNamespace(grid=grid, mesh=SimpleNamespace(gather=meet)))

    for row, said in ((1.0, ""), (2.0, "ranks 0, 1 have different bits of row_var of w")):
        first: list[dict[str, int]] = []
        check_replicas(rank(0, 1.0, lambda mine, first=first: first.append(mine) or first))
        assert check_replicas(rank(1, row, lambda mine, first=first: [*first, mine])) == said


def test_gradients_that_a_pipeline_computes_later_are_compared_too():
    torch.manual_seed(0)
    linear, x, later = torch.nn.Linear(4, 3), torch.randn(5, 4), WeightGradients()
    parameters = dict(linear.named_parameters())
    with recording(parameters) as at_once:
        linear(x).sum().backward()
    later.defer([linear])
    with recording(parameters) as found:
        y = linear(x.requires_grad_()).sum()
        with later.later((0, 0)):
            y.backward()
        assert not found
        later.compute((0, 0))
    assert found == at_once and set(found) == {"weight", "bias"}


@pytest.mark.parametrize("fault", ["own", "other"])
def test_a_rank_with_a_wrong_result_is_named(fault, data_folder, tmp_path, capfd):
    out = tmp_path / "train-x"
    arguments = (spec(CHECKS, data_parallel="zero2"), str(data_folder), str(out))
    ended = results(2, *arguments, fault)
    said = "silent corruption at step 4: rank 1 does not repeat its own result (first in "
    assert all(one.startswith(said) and "test it, then start again" in one for one in ended), ended
    assert checkpoints_of(out) == ["step-00000003"]
    again = results(2, *arguments)
    whole = results(2, spec(data_parallel="zero2"), str(data_folder), str(tmp_path / "whole"))
    assert again == whole and "resuming at step 3 of 5" in capfd.readouterr().err


def test_post_validation_waits_for_the_comparison_of_ranks(data_folder, tmp_path):
    early = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": {"kind": "zb_h1", "post_validation": True}}
    asked = {**spec(CHECKS, **early), "gradient_accumulation_steps": 2}
    ended = results(2, asked, str(data_folder), str(tmp_path / "x"), "own", 0)
    assert all("silent corruption at step 4: rank 0" in one for one in ended), ended


def test_a_device_that_is_always_wrong_is_named_by_two_others(data_folder, tmp_path):
    ended = results(3, spec(CHECKS), str(data_folder), str(tmp_path / "x"), "always", 2)
    assert all("step 4: rank 2 computes another result than two others, each time" in one for one in ended), ended


def test_a_changed_weight_is_named_before_it_is_saved(data_folder, tmp_path):
    out = tmp_path / "x"
    damaged = {**spec(CHECKS), "checkpoint": {"interval": 2, "check": {"replicas_interval": 100}}}
    ended = results(3, damaged, str(data_folder), str(out), "weight", 1)
    assert all("silent corruption at step 4: rank 1 has other bits of " in one for one in ended), ended
    assert checkpoints_of(out) == ["step-00000002"]


def test_it_goes_on_where_that_is_asked_for(data_folder, tmp_path, capfd):
    """On one process, which computes its part twice; the step is computed once more."""
    data = {"data": Artifact.read(data_folder)}
    plain = Train.read(SPEC).make(tmp_path / "plain", data, Run(quiet=True))
    [content] = results(1, spec({**CHECKS, "on_mismatch": "warn"}), str(data_folder), str(tmp_path / "x"), "own", 0)
    assert "silent corruption at step 4: rank 0 does not repeat its own result" in capfd.readouterr().err
    assert content == plain.content


def test_what_it_cannot_compare_is_refused_and_the_identity_stays(tmp_path: Path):
    lossy = {"data_parallel": {"kind": "powersgd"}}
    with pytest.raises(SpecError, match=r"checkpoint\.check works where ranks have the same weights"):
        Train.read(spec(CHECKS, **lossy))
    assert Train.read(spec(CHECKS)).identity() == Train.read(SPEC).identity()
