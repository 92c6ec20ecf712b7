"""Tensor and sequence parallelism on gloo: every layout trains as one process does, and reads every other's checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.base.run import Run
from hone.cost.train.tensor import Messages, Tensor
from hone.cost.train.update import adamw
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.model.hf import load
from hone.model.mixers.mla import MLA
from hone.model.shape import Shape
from hone.parallel.axis import Axis
from hone.parallel.cut import Cut
from hone.parallel.vocabulary import Teacher, vocabulary_cross_entropy
from hone.train import OPTIMIZERS
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from hone.train.tensor_parallel.decoder import check_tensor_parallel, cuts_of
from hone.train.weights import describe_parameters
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import (
    HSDP,
    SPEC,
    assert_same_weights,
    handed_over,
    on_ranks,
    weights_of,
)
from tests.train.ranks import OPTIONS, made, trained

TP2 = {"tensor_parallel_degree": 2}
PLAIN = {**TP2, "enable_sequence_parallel": False}
ASYNC = {**TP2, "enable_async_tensor_parallel": True}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"model": {"num_layers": 2}, "tied": True, "uneven": True, "gradient_accumulation_steps": 2},
    {"model": {"num_layers": 2}, "optimizer": "muon", "gradient_accumulation_steps": 2},
    {"masked": True, "activation_checkpointing": "sqrt"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "offload"},
    # With sides of 256 a rank's part has the whole matrix's blocks of 8-bit moments.
    {
        "optimizer": "adamw_8bit",
        "model": {"num_layers": 1, "hidden_size": 256, "head_dim": 128, "intermediate_size": 512},
    },
    {"optimizer": "lion", "model": {"num_layers": 1}},
    {"optimizer": "adafactor", "model": {"num_layers": 1}, "biased": True},
    {"optimizer": "soap", "model": {"num_layers": 1}, "gradient_accumulation_steps": 2},
    {"distill": {"alpha": 0.7, "temperature": 2.0}, "model": {"num_layers": 2}, "uneven": True},
    {"model": {"num_layers": 1, "num_kv_heads": 4}},
    {"model": {"num_layers": 2}, "traced": True, "gradient_accumulation_steps": 2},
]


def with_layout(number: int) -> list[tuple[int, dict[str, Any]]]:
    """The settings, by their places, in the layouts that so many ranks have. On 2 ranks each setting is in each layout; on more,
    where a rank's part is also divided over other ranks, each data parallelism has what it divides: counts, matrices, masks."""
    layouts: list[tuple[dict[str, Any], tuple[int, ...]]] = {
        2: [
            ({"parallelism": TP2}, (*range(11), 12)),
            ({"parallelism": PLAIN}, (*range(6), 10)),
            ({"parallelism": ASYNC}, (0, 1, 4, 8, 10, 12)),
        ],
        4: [
            ({"parallelism": PLAIN, "data_parallel": "zero2"}, (1, 2, 3, 8)),
            ({"parallelism": TP2, "data_parallel": "zero3"}, (1, 2, 3, 4, 5, 8, 9)),
            ({"parallelism": {**ASYNC, "tensor_parallel_degree": 4}}, (11,)),
            ({"parallelism": ASYNC, "data_parallel": "zero3"}, (1, 3)),
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
        for name in weights[place]:
            assert all(torch.equal(one[name], ranks[0][name]) for one in ranks), f"{setting}: ranks differ: {name}"
        assert_same_weights(ranks[0], weights[place], setting.get("optimizer", "adamw"))


@pytest.mark.slow
def test_it_compiles_what_is_between_the_transfers(data_folder, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    settings = [{"model": {"num_layers": 2}, "parallelism": TP2, "compile": compiled} for compiled in (False, True)]
    for plain, compiled in on_ranks(2, trained, str(data_folder), str(tmp_path), settings):
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=0, atol=1e-5)


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
    spec = {**SPEC, "steps": 2, "objective": "distill", "validation": {"sequences": 2}}
    parents = {"data": Artifact.read(data_folder), "teacher": one}
    alone = Train.read({**spec, "parallelism": {}}).make(tmp_path / "alone", parents, Run(quiet=True))
    distilled = partial(made, teacher=str(one.folder))
    on_ranks(2, distilled, {**spec, "parallelism": ASYNC}, str(data_folder), str(tmp_path / "parts"))
    rows = [read_jsonl(folder / "steps.jsonl") for folder in (tmp_path / "parts", alone.folder)]
    assert all(mine == pytest.approx(other, rel=1e-4) for mine, other in zip(*rows, strict=True)) and rows[0]


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
    part = Parallelism(tensor_parallel_degree=2).shared(whole, adamw, 1, 64).tensor.dims
    held = [sum(torch.Size(cut.local_shape).numel() for cut in cuts_of(whole, rank, 2).values()) for rank in (0, 1)]
    norms = (2 * whole.num_layers + 1) * whole.hidden_size
    assert part.num_params == max(held) + norms
    # A ring: 2 (n - 1) / n of every message, 4 messages a layer and 2 around them.
    sent = Messages(48, 1000, "float32", "cuda")
    moved = Tensor(2, True, part).step_s(sent) - 18 * 2 * 5e-6
    assert moved == pytest.approx(18 * 4 * 1000 * 48 / 3e11)
    # Each of a layer's 8 borders waits for what a message of half the tokens takes longer than half of one of four products.
    overlapped = Tensor(2, True, part, overlap=True)
    message, layers = 4 * 500 * 48 / 3e11, part.num_layers
    inside = Tensor(2, True, part).step_s(sent) * 4 * layers / (4 * layers + 2)
    assert overlapped.hidden_s(sent, products_s=1.0) == pytest.approx(inside)
    waits = 8 * layers * message * 3 / 4
    assert overlapped.hidden_s(sent, products_s=message * 2 * layers) == pytest.approx(inside - waits)
    assert overlapped.room_bytes(48, 1000, "float32", "cuda") == 4 * 4 * 1000 * 48
    # Four sums of two parts, read and written; two copies.
    assert overlapped.added_bytes(sent) == layers * (4 * 3 + 2 * 2) * 4 * 500 * 48
    # On a CPU nothing is hidden, and two inputs of a layer are gathered once more, half a sum each.
    on_cpu = replace(sent, device="cpu")
    assert overlapped.hidden_s(on_cpu, products_s=1.0) == overlapped.room_bytes(48, 1000, "float32", "cpu") == 0.0
    more = overlapped.step_s(on_cpu) / Tensor(2, True, part).step_s(on_cpu)
    assert more == pytest.approx((5 * layers + 2) / (4 * layers + 2))


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
    with pytest.raises(SpecError, match="no transfers to hide with tensor_parallel_degree 1"):
        Parallelism.read({"enable_async_tensor_parallel": True})
    with pytest.raises(SpecError, match="needs enable_sequence_parallel"):
        Parallelism.read({**PLAIN, "enable_async_tensor_parallel": True})
    with pytest.raises(SpecError, match=r"the teacher's layers\.0 is mla, which uses its input beside one product"):
        mla = MLA(kind="mla", num_heads=4, head_dim=8, rope_dim=8, latent_dim=16)
        whole = SHAPE.config(259)
        layers = tuple(one.model_copy(update={"mixer": mla}) for one in whole.layers)
        teacher = whole.model_copy(update={"layers": layers})
        Parallelism.read(ASYNC).check(whole, seq_len=32, teacher=teacher)
    planned(2, compile=True)
    with pytest.raises(SpecError, match="seq_len 33 is not divisible"):
        planned(2, seq_len=33)
    with pytest.raises(SpecError, match="5 tokens cannot be divided among 4"):
        config = SHAPE.model_copy(update={"num_kv_heads": 4}).config(5)
        check_tensor_parallel(config, 4)


@pytest.mark.parametrize("softcaps", [(None, None), (5.0, 4.0)])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.7, 2.0), (1.0, 1.0)])
def test_the_distillation_of_chunks_is_its_definition(softcaps, alpha, temperature):
    drawn = torch.Generator().manual_seed(0)
    x, weight, hidden, theirs = (
        torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((11, 6), (17, 6), (11, 5), (17, 5))
    )
    targets = torch.randint(17, (11,), generator=drawn)
    targets[3] = -100
    results = []
    for ours in (True, False):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            teacher = Teacher(hidden, theirs, alpha, temperature, softcaps[1])
            options = {"softcap": softcaps[0], "chunk_tokens": 4, "teacher": teacher}
            loss = vocabulary_cross_entropy(a, b, targets, Axis([0], 0), 0, **options)
        else:
            logits, wanted = (
                one if cap is None else torch.tanh(one / cap) * cap
                for one, cap in zip((a @ b.T, hidden @ theirs.T), softcaps, strict=True)
            )
            soft, wanted = (torch.log_softmax(one / temperature, -1) for one in (logits, wanted))
            apart = torch.nn.functional.kl_div(soft, wanted, log_target=True, reduction="none").sum(-1)
            apart = apart[targets >= 0].sum() * temperature**2
            loss = alpha * apart + (1 - alpha) * torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (3 * loss).backward()
        results.append((loss.detach(), a.grad, b.grad))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_states_of_other_parts_are_read(data_folder, tmp_path):
    """8-bit moments in other blocks, factored and turned ones of whole matrices: by other tensor-parallel ranks, and divided by zero1."""
    settings = [{"optimizer": one, "model": {"num_layers": 1}} for one in ("adamw_8bit", "adafactor", "soap")]
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"parallelism": TP2}),
        (4, {"parallelism": TP2, "data_parallel": "zero1"}),
    ]
    for place, (num_ranks, layout) in enumerate(layouts):
        kept = [
            {**one, **layout, "until": 1, "write": str(tmp_path / f"{place}-{one['optimizer']}")} for one in settings
        ]
        on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), kept)
    [final] = on_ranks(1, trained, str(data_folder), str(tmp_path), settings)
    whole = [weights_of(tmp_path, number, 1)[0] for number in range(len(settings))]
    for place, (num_ranks, layout) in enumerate(layouts):
        read = [
            {**one, **layout, "read": str(tmp_path / f"{(place + way) % 3}-{one['optimizer']}")}
            for way in (1, 2)
            for one in settings
        ]
        found = on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), read)[0]
        for number, (steps, one) in enumerate(zip(found, read, strict=True)):
            expected, weights = number % len(settings), weights_of(tmp_path, number, num_ranks)[0]
            assert steps[0] == pytest.approx(final[expected][-1], rel=2e-5), one
            if one["optimizer"] != "adamw_8bit":
                assert_same_weights(weights, whole[expected], one["optimizer"])
                continue
            # A moment is rounded again, to the codes of another block: within a few hundredths of a step.
            apart = torch.cat([(weights[name] - other).abs().flatten() for name, other in whole[expected].items()])
            assert apart.mean() <= 2e-5 and (apart > 2e-4).double().mean() <= 1e-2, (
                f"{one}: {apart.mean()} {apart.max()}"
            )


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_the_state_of_a_rank_is_predicted(name):
    """Of the first rank, which has no fewer rows of the vocabulary than others."""
    config = SHAPE.model_copy(update={"tie_embeddings": False}).config(259)
    optimizer = OPTIMIZERS.read({"kind": name, **OPTIONS[name]})
    parameters, cuts = describe_parameters(build(config)), cuts_of(config, 0, 2)
    held = 0
    for group in optimizer.groups(parameters):
        for one in group.names:
            shape = cuts[one].local_shape if one in cuts else parameters[one].shape
            held += sum(part.nbytes for part in group.rule.start(torch.zeros(shape), parameters[one]).values())
    shared = Parallelism(tensor_parallel_degree=2).shared(
        config, partial(optimizer.cost, dtype="float32", device="cpu"), 1, 64
    )
    assert shared.update.state_bytes == pytest.approx(held, rel=0.03)


def test_a_figure_says_what_its_ranks_are():
    """No kind of data parallelism where there is one copy of the weights."""
    assert Parallelism(tensor_parallel_degree=2).said(2) == "2 tensor-parallel ranks"
    assert Parallelism(tensor_parallel_degree=2).said(4) == "ddp, 2 tensor-parallel ranks"
    both = Parallelism.read({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "data_parallel": "zero1"})
    assert both.said(4) == "2 pipeline ranks (1f1b), 2 tensor-parallel ranks"
    assert both.said(8) == "zero1, 2 pipeline ranks (1f1b), 2 tensor-parallel ranks"
    shared = Parallelism.read({"context_parallel_degree": 2, "data_parallel": "zero2"})
    assert shared.said(2) == "zero2, 2 ranks share each sequence (ring)"
