"""Tensor and sequence parallelism on gloo: every layout trains as one process does, and reads every other's checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.base.run import Run
from hone.cost.tensor import Tensor
from hone.cost.update import adamw
from hone.measure.machine import describe
from hone.model.hf import load
from hone.model.shape import Shape
from hone.parallel.axis import Axis
from hone.parallel.cut import Cut
from hone.parallel.vocabulary import vocabulary_cross_entropy
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from hone.train.tensor_parallel.decoder import check_tensor_parallel, cuts_of
from tests.train.conftest import SHAPE
from tests.train.ranks import made, trained
from tests.train.test_data_parallel import HSDP, SPEC, handed_over, on_ranks, weights_of

TP2 = {"tensor_parallel_degree": 2}
PLAIN = {**TP2, "enable_sequence_parallel": False}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"model": {"num_layers": 2}, "tied": True, "uneven": True, "gradient_accumulation_steps": 2},
    {"model": {"num_layers": 2}, "optimizer": "muon", "gradient_accumulation_steps": 2},
    {"masked": True, "activation_checkpointing": "sqrt"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "offload"},
]


def with_layout(number: int) -> list[tuple[int, dict[str, Any]]]:
    """The settings, by their places, in the layouts that so many ranks have. On 2 ranks each setting is in each layout; on more,
    where a rank's part is also divided over other ranks, each data parallelism has what it divides: counts, matrices, masks."""
    layouts: list[tuple[dict[str, Any], tuple[int, ...]]] = {
        2: [({"parallelism": TP2}, tuple(range(6))), ({"parallelism": PLAIN}, tuple(range(6)))],
        4: [
            ({"parallelism": PLAIN, "data_parallel": "zero2"}, (1, 2, 3)),
            ({"parallelism": TP2, "data_parallel": "zero3"}, (1, 2, 3, 4, 5)),
        ],
        8: [
            ({"parallelism": TP2, "data_parallel": "ddp"}, (1,)),
            ({"parallelism": TP2, "data_parallel": "zero1"}, (2,)),
            ({"parallelism": TP2, "data_parallel": HSDP}, (1, 2, 3)),
            ({"parallelism": TP2, "data_parallel": "zero3"}, (2, 4)),
        ],
    }[number]
    settings = [(place, {**SETTINGS[place], **layout}) for layout, places in layouts for place in places]
    return [(place, {**one, "gradient_accumulation_steps": 1}) for place, one in settings] if number == 8 else settings


@pytest.fixture(scope="module")
def alone(data_folder, tmp_path_factory) -> tuple[list, list[dict[str, torch.Tensor]]]:
    """Losses and weights of one process, for every setting."""
    folder = tmp_path_factory.mktemp("alone")
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), SETTINGS)
    return losses, [weights_of(folder, number, 1)[0] for number in range(len(SETTINGS))]


@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_it_trains_as_one_process_does(num_ranks, alone, data_folder, tmp_path):
    losses, weights = alone
    chosen = with_layout(num_ranks)
    every = on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), [setting for _, setting in chosen])
    assert all(one == every[0] for one in every), "ranks differ in losses"
    for number, (place, setting) in enumerate(chosen):
        ours, theirs = torch.tensor(every[0][number]), torch.tensor(losses[place])
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6, msg=lambda said, one=setting: f"{one}: {said}")
        ranks = weights_of(tmp_path, number, num_ranks)
        for name, whole in weights[place].items():
            assert all(torch.equal(one[name], ranks[0][name]) for one in ranks), f"{setting}: ranks differ: {name}"
            assert (ranks[0][name] - whole).abs().max() <= 2e-6, f"{setting} {name}"


def test_every_layout_reads_the_checkpoints_of_every_other(data_folder, tmp_path):
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"parallelism": TP2}),
        (4, {"parallelism": {"tensor_parallel_degree": 4}}),
        (4, {"parallelism": TP2, "data_parallel": "zero1"}),
    ]
    layouts = [(num_ranks, {**layout, "model": {"num_layers": 2, "num_kv_heads": 4}}) for num_ranks, layout in layouts]
    pairs = [((writer + way) % 4, writer) for writer in range(4) for way in (1, 2)]  # every two meet
    (whole, final), *found = handed_over(layouts, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=2e-6)
        for name, one in weights.items():
            assert (one - final[name]).abs().max() <= 2e-6, name


def test_the_stage_writes_the_whole_model(data_folder, tmp_path):
    one = Train.read({**SPEC, "parallelism": {}}).make(
        tmp_path / "one", {"data": Artifact.read(data_folder)}, Run(quiet=True)
    )
    spec = {**SPEC, "parallelism": {"data_parallel": "zero1", **TP2}}
    assert len(set(on_ranks(4, made, spec, str(data_folder), str(tmp_path / "two")))) == 1
    two = Artifact.read(tmp_path / "two")
    ours, theirs = load(two.folder).state_dict(), load(one.folder).state_dict()
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)
    for mine, other in zip(read_jsonl(two.folder / "steps.jsonl"), read_jsonl(one.folder / "steps.jsonl"), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert two.fingerprint == one.fingerprint


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_parts_of_the_ranks_are_the_whole(num_ranks):
    shape = Shape(hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=6, intermediate_size=96, max_seq_len=64)
    config = shape.config(259)
    every = [cuts_of(config, rank, num_ranks) for rank in range(num_ranks)]
    assert "layers.1.mixer.qkv.weight" in every[0] and "layers.1.mixer_norm.weight" not in every[0]
    for name, first in every[0].items():
        whole = torch.randn(first.shape)
        again = torch.full(first.shape, torch.nan)
        for cuts in every:
            part = cuts[name].take(whole)
            assert tuple(part.shape) == cuts[name].local_shape
            cuts[name].put(part, again)
        assert torch.equal(again, whole), name
        assert sum(torch.Size(cuts[name].local_shape).numel() for cuts in every) == whole.numel()
    assert Cut.read([[4, 2], 0, [[0, 1], [3, 4]]]) == Cut((4, 2), 0, ((0, 1), (3, 4)))


def test_plans_are_of_one_rank(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    two = describe("cpu").model_copy(update={"num_ranks": 2})
    big = {**SPEC, "model": {**SHAPE.model_dump(), "hidden_size": 512, "intermediate_size": 2048}}
    plans = {
        name: Train.read({**big, "parallelism": one}).plan(facts, two).estimates
        for name, one in {"ddp": {}, "tp": PLAIN, "sp": TP2}.items()
    }
    memory = {name: one[MEMORY].value for name, one in plans.items()}
    assert memory["sp"] < memory["tp"] < memory["ddp"]
    assert "inside layers" in plans["sp"]["time_s"].formula and "inside layers" not in plans["ddp"]["time_s"].formula
    assert len({one["num_params"].value for one in plans.values()}) == 1
    assert len({one["model_bytes"].value for one in plans.values()}) == 1
    whole = SHAPE.config(259)
    part = Parallelism(tensor_parallel_degree=2).shared(whole, adamw, 1, 64).tensor.facts
    held = [sum(torch.Size(cut.local_shape).numel() for cut in cuts_of(whole, rank, 2).values()) for rank in (0, 1)]
    norms = (2 * whole.num_layers + 1) * whole.hidden_size
    assert part.num_params == max(held) + norms
    # A ring: 2 (n - 1) / n of every message, 4 messages a layer and 2 around them.
    moved = Tensor(2, True, part).step_s(48, 1000, 0, 1, "float32", "cuda") - 18 * 2 * 5e-6
    assert moved == pytest.approx(18 * 4 * 1000 * 48 / 3e11)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_loss_of_chunks_is_that_of_torch(softcap):
    drawn = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((11, 6), (17, 6)))
    targets = torch.randint(17, (11,), generator=drawn)
    targets[3] = -100
    results = []
    for ours in (True, False):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            loss = vocabulary_cross_entropy(a, b, targets, Axis([0], 0), 0, softcap=softcap, chunk_tokens=4)
        else:
            logits = a @ b.T
            logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (3 * loss).backward()
        results.append((loss.detach(), a.grad, b.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_cannot_be_divided_is_said(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    machine = describe("cpu").model_copy(update={"num_ranks": 4})

    def planned(degree: int, **changes: Any) -> None:
        Train.read({**SPEC, "parallelism": {"tensor_parallel_degree": degree}, **changes}).plan(facts, machine)

    planned(2)
    with pytest.raises(SpecError, match="tensor_parallel_degree 3 does not divide 4 ranks"):
        planned(3)
    with pytest.raises(SpecError, match="2 heads, fewer than 4") as caught:
        planned(4)
    assert "tensor_parallel_degree" in caught.value.fix
    with pytest.raises(SpecError, match="optimizer adamw_8bit has no form for parts of matrices"):
        planned(2, optimizer={"kind": "adamw_8bit"})
    with pytest.raises(SpecError, match="compile does not work"):
        planned(2, compile=True)
    with pytest.raises(SpecError, match="seq_len 33 is not divisible"):
        planned(2, seq_len=33)
    with pytest.raises(SpecError, match="5 tokens cannot be divided among 4"):
        config = SHAPE.model_copy(update={"num_kv_heads": 4}).config(5)
        check_tensor_parallel(config, 4)
