"""Data parallelism on gloo: every technique trains as one process does, reads every checkpoint, and ends with one error."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.cost.dims import ModelDims
from hone.cost.memory import train_bytes
from hone.cost.train.replicas import Divided
from hone.model.hf import load
from hone.train import DATA_PARALLEL
from hone.train.checkpoint import Checkpoints
from hone.train.data_parallel.flat import ALIGN, Flat
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.ranks import STEPS, failing, made, trained

HSDP = {"kind": "zero3", "data_parallel_replicate_degree": 2}
TECHNIQUES = ["ddp", "zero1", "zero2", "zero3"]
TWO: dict[str, Any] = {"model": {"num_layers": 2}}
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {**TWO, "optimizer": "muon", "gradient_accumulation_steps": 2},
    {**TWO, "optimizer": "adamw_8bit"},
    {**TWO, "optimizer": "adafactor"},
    {**TWO, "optimizer": "lion"},
    {**TWO, "optimizer": "soap"},
    {**TWO, "uneven": True, "gradient_accumulation_steps": 2},
    {**TWO, "masked": True, "optimizer": "muon"},
    {"activation_checkpointing": "sqrt"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": {"kind": "offload", "recompute": True}},
    {"activation_checkpointing": {"kind": "every_nth", "n": 2}, "gradient_accumulation_steps": 2},
]
DIVIDED = (2, 3, 5, 6, 7, 11)
"""Places of the settings for more than two ranks: those whose state, masks, counts or recomputed layers are cut in other places."""


def on_ranks(num_ranks: int, function: Any, *arguments: Any) -> list[Any]:
    ended = together(num_ranks, function, *arguments)
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr[-2000:] for one in ended)
    return [one.result for one in ended]


def weights_of(folder: Path, number: int, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{number}-{num_ranks}-{rank}.pt") for rank in range(num_ranks)]


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], optimizer: str) -> None:
    """Within 2e-6, and 2e-4 in 8 bits, where a code may fall to its neighbour. One weight in ten thousand may be apart by more,
    up to two learning rates a step: where the rounding of a sum decides Lion's sign, or a code among the smallest. SOAP's are within
    a tenth of a step: directions in which a gradient is almost zero turn with its rounding, on each CPU another way."""
    apart = torch.cat([(ours[name] - whole).abs().flatten() for name, whole in theirs.items()])
    if optimizer in ("lion", "adamw_8bit"):
        far = apart > (2e-4 if optimizer == "adamw_8bit" else 2e-6)
        assert far.double().mean() <= 1e-4 and apart.max() <= STEPS * 2e-3, optimizer
    elif optimizer == "soap":
        assert apart.max() <= 1e-4 and apart.mean() <= 5e-6, f"{optimizer}: {apart.max():.2g}, mean {apart.mean():.2g}"
    else:
        for name, whole in theirs.items():
            assert (ours[name] - whole).abs().max() <= 2e-6, f"{optimizer} {name}"


@pytest.fixture(scope="module")
def alone(data_folder, tmp_path_factory) -> tuple[list, list[dict[str, torch.Tensor]]]:
    """Losses and weights of one process, for every setting."""
    folder = tmp_path_factory.mktemp("alone")
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), SETTINGS)
    return losses, [weights_of(folder, number, 1)[0] for number in range(len(SETTINGS))]


@pytest.mark.parametrize(
    ("technique", "num_ranks"),
    [
        *(pytest.param(name, 2, id=f"{name}-2") for name in TECHNIQUES),
        pytest.param("zero2", 4, id="zero2-4"),
        pytest.param(HSDP, 4, id="hsdp-2x2"),
        *(pytest.param(name, 4, id=f"{name}-4", marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero3")),
        pytest.param(HSDP, 8, id="hsdp-2x4", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_process_does(technique, num_ranks, alone, data_folder, tmp_path):
    losses, weights = alone
    places = range(len(SETTINGS)) if num_ranks == 2 else DIVIDED
    settings = [{**SETTINGS[place], "data_parallel": technique} for place in places]
    if num_ranks > 4:  # micro-batches of 8 sequences on 8 ranks
        settings = [{**one, "gradient_accumulation_steps": 1} for one in settings]
    for found in on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), settings):
        for ours, place in zip(found, places, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses[place]), rtol=2e-6, atol=2e-6)
    for number, place in enumerate(places):
        ranks = weights_of(tmp_path, number, num_ranks)
        for name in weights[place]:
            assert all(torch.equal(one[name], ranks[0][name]) for one in ranks), f"ranks differ: {name}"
        assert_same_weights(ranks[0], weights[place], SETTINGS[place].get("optimizer", "adamw"))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_in_half_precision_all_techniques_give_the_same_bits(precision, data_folder, tmp_path):
    """The sums are of the same float32 numbers, and two of them have one order."""
    settings = [
        {**TWO, "data_parallel": name, "precision": precision, "gradient_accumulation_steps": parts}
        for parts in (1, 2)
        for name in TECHNIQUES
    ]
    found = on_ranks(2, trained, str(data_folder), str(tmp_path), settings)[0]
    for parts in (0, 4):
        first = weights_of(tmp_path, parts, 2)[0]
        assert all(
            tensor.dtype == (torch.float16 if precision == "fp16" else torch.bfloat16) for tensor in first.values()
        )
        for number in range(parts, parts + 4):
            for one in weights_of(tmp_path, number, 2):
                assert all((one[name] - first[name]).abs().max() <= 2e-3 for name in first)
    assert all(abs(one[0] - other[0]) < 1e-2 for steps in found for one, other in zip(steps, found[0], strict=True))


@pytest.mark.slow
def test_an_update_in_one_pass_is_the_plain_one(data_folder, tmp_path):
    """As on a GPU, where AdamW's pass over a weight scales its gradient and writes the rounded weight that others gather."""
    kinds = [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "masked": True}]
    kinds.append({"precision": "bf16", "gradient_accumulation_steps": 2})
    fused = [{**kind, "fused": now} for kind in kinds for now in (False, True)]
    on_ranks(1, trained, str(data_folder), str(tmp_path), fused)
    never = {"kind": "zero3", "reshard_after_forward": "never"}
    settings = [{**one, "data_parallel": how} for how in ("zero1", "zero3", never) for one in fused]
    on_ranks(2, trained, str(data_folder), str(tmp_path), settings)
    for num_ranks, count in ((1, len(fused)), (2, len(settings))):
        for number in range(0, count, 2):
            plain, ours = (weights_of(tmp_path, number + now, num_ranks)[0] for now in (0, 1))
            apart = torch.cat([(ours[name].float() - one.float()).abs().flatten() for name, one in plain.items()])
            wide = fused[number % len(fused)]["precision"] == "fp32"
            assert apart.mean() <= (1e-7 if wide else 1e-5) and apart.max() <= (2e-6 if wide else 4e-3), number


def test_compiled_layers_train_with_gathered_weights(data_folder, tmp_path):
    """The graphs of layers keep weights for their backward pass, whose memory was freed and gathered anew meanwhile."""
    kept = {"kind": "zero3", "reshard_after_forward": "never"}
    again = {"activation_checkpointing": {"kind": "every_nth", "n": 2}, "gradient_accumulation_steps": 2}
    settings = [
        {"data_parallel": "zero3", **again},
        {"data_parallel": kept},
        {"data_parallel": "zero3", "optimizer": "muon"},
    ]
    settings = [{**one, "compile": compiled} for one in settings for compiled in (False, True)]
    found = on_ranks(2, trained, str(data_folder), str(tmp_path), settings)[0]
    for number in range(0, len(settings), 2):
        for plain, compiled in zip(found[number], found[number + 1], strict=True):
            assert compiled == pytest.approx(plain, rel=2e-6)
        weights = [weights_of(tmp_path, place, 2)[0] for place in (number, number + 1)]
        assert_same_weights(weights[1], weights[0], settings[number].get("optimizer", "adamw"))


def handed_over(
    layouts: list[tuple[int, dict[str, Any]]], pairs: list[tuple[int, int]], data: Path, folder: Path
) -> Iterator[tuple[list[list[float]], dict[str, torch.Tensor]]]:
    """The steps and the weights of layout 0, which is one process, through all steps; then those of each of `pairs` (reader,
    writer) of layouts, of which the writer made all steps but the last. Layouts on equally many ranks start together."""
    kept = [str(folder / f"from{number}") for number in range(len(layouts))]
    settings = [{**layout, "until": STEPS - 1, "write": into} for (_, layout), into in zip(layouts, kept, strict=True)]
    sizes = sorted({num_ranks for num_ranks, _ in layouts})
    for size in sizes:
        mine = [setting for setting, (num_ranks, _) in zip(settings, layouts, strict=True) if num_ranks == size]
        on_ranks(size, trained, str(data), str(folder), mine)
    [[whole]] = on_ranks(1, trained, str(data), str(folder), [layouts[0][1]])
    yield whole, weights_of(folder, 0, 1)[0]
    for size in sizes:
        settings = [
            {**layouts[reader][1], "read": kept[writer]} for reader, writer in pairs if layouts[reader][0] == size
        ]
        for number, steps in enumerate(on_ranks(size, trained, str(data), str(folder), settings)[0]):
            yield steps, weights_of(folder, number, size)[0]


@pytest.mark.parametrize(("optimizer", "apart"), [("adamw_8bit", 0), ("muon", 1), ("adafactor", 2)])
def test_every_layout_reads_the_checkpoints_of_every_other(optimizer, apart, data_folder, tmp_path):
    """Every pair of layouts under one of the optimizers, every layout under each of them."""
    layouts = [(1, "ddp"), (2, "ddp"), (2, "zero1"), (2, "zero3"), (4, "zero2"), (4, HSDP)]
    chosen = [(num_ranks, {**TWO, "data_parallel": one, "optimizer": optimizer}) for num_ranks, one in layouts]
    pairs = [(one, other) for one in range(6) for other in range(6) if (one - other) % 3 == apart]
    (whole, final), *found = handed_over(chosen, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=2e-5)
        assert_same_weights(weights, final, optimizer)


def test_a_checkpoint_of_ranks_has_each_element_once(data_folder, tmp_path):
    setting = {**TWO, "data_parallel": HSDP, "until": 1, "write": str(tmp_path / "kept")}
    on_ranks(4, trained, str(data_folder), str(tmp_path), [setting])
    stored, numbers = Checkpoints(tmp_path / "kept").newest()
    weights = weights_of(tmp_path, 0, 4)[0]
    for name, whole in weights.items():
        assert torch.equal(stored.part(f"weight.{name}", 0, whole.numel()), whole.view(-1))
        assert len(stored.part(f"exp_avg.{name}", 3, 5)) == 5
    files = sorted(path.name for path in (tmp_path / "kept" / "step-00000001").iterdir())
    assert files == ["numbers.json", *(f"tensors-0000{rank}-of-00004.safetensors" for rank in range(4))]
    assert numbers["done"] == 1 and stored.whole("updates") == 1
    from hone.base.errors import ArtifactError

    with pytest.raises(ArtifactError, match="of 9999999 elements"):
        stored.part("weight.norm.weight", 0, 9_999_999)


SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 5,
    "validation": {"interval": 3, "sequences": 7},
    "checkpoint": {"interval": 2},
    "optimizer": {"lr": 1e-3, **STEADY},
    "parallelism": {"data_parallel": "zero3"},
}


def test_a_killed_stage_resumes_on_other_ranks(data_folder, tmp_path):
    one = Train.read(SPEC).make(tmp_path / "one", {"data": Artifact.read(data_folder)}, Run(quiet=True))
    ended = together(2, made, SPEC, str(data_folder), str(tmp_path / "two"), 3)
    assert ended[1].returncode == -signal.SIGKILL
    assert "rank 0 lost" in ended[0].result and "the stage resumes" in ended[0].result
    again = on_ranks(
        4, made, {**SPEC, "parallelism": {"data_parallel": "zero1"}}, str(data_folder), str(tmp_path / "two")
    )
    assert len(set(again)) == 1
    two = Artifact.read(tmp_path / "two")
    two.verify()
    ours, theirs = load(two.folder).state_dict(), load(one.folder).state_dict()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)
    for mine, other in zip(read_jsonl(two.folder / "steps.jsonl"), read_jsonl(one.folder / "steps.jsonl"), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert two.figures["num_ranks"].value == 4 and two.fingerprint == one.fingerprint
    assert "num_ranks" not in one.figures


@pytest.mark.slow
def test_all_ranks_end_early_at_the_same_step(data_folder, tmp_path):
    """By the time, which rank 0 alone knows, and by a loss, which all compute together."""
    for name, ends in (("time", {"max_time_s": 1e-6}), ("loss", {"val_loss": 50.0})):
        spec = {**SPEC, "early_stopping": {**ends, "interval": 2}}
        out = tmp_path / f"train-{name}"
        contents = [one.result for one in together(2, made, spec, str(data_folder), str(out))]
        assert contents == [Artifact.read(out).content] * 2
        assert Artifact.read(out).figures["num_steps"].value == 2
        assert read_jsonl(out / "steps.jsonl")[-1]["step"] == 2


def test_a_failing_rank_ends_all_with_its_error(data_folder):
    first, second = on_ranks(2, failing, str(data_folder))
    assert second == "ZeroDivisionError: a bug"
    assert first == "MachineError: rank 1 failed: ZeroDivisionError: a bug"


@pytest.mark.parametrize("whole", [False, True])
def test_a_flat_layout_holds_every_element_once(whole):
    shapes = {"a": (3, 5), "b": (700,), "c": (40, 40), "d": (1,), "e": (16, 64)}
    for num_slices in (1, 2, 3, 8):
        flat = Flat(shapes, num_slices, whole=whole)
        values = torch.zeros(flat.size)
        for place, name in enumerate(shapes):
            flat.view(values, name).add_(place + 1)
        for place, (name, shape) in enumerate(shapes.items()):
            count = int(torch.tensor(shape).prod())
            seen = torch.zeros(count)
            for index in range(num_slices):
                pieces = [one for one in flat.ranges(index) if one.name == name]
                assert not whole or all((one.start, one.stop) == (0, count) for one in pieces)
                for one in pieces:
                    assert one.start % ALIGN == 0
                    seen[one.start : one.stop] += 1
                    held = flat.slice_of(values, index)[one.at : one.at + one.stop - one.start]
                    assert (held == place + 1).all()
            assert (seen == 1).all(), name


def test_memory_falls_as_the_zero_paper_says():
    """Rajbhandari et al. 2019, figure 1: 7.5 B weights, 64 ranks, Adam in mixed precision: 31.4, 16.6 and 1.9 GB of state.

    Gradients are float32 here and float16 there: 4 instead of 2 bytes. Of several micro-batches: the gradients of one leave
    layer by layer with zero1, too.
    """
    dims = ModelDims.uniform(
        num_layers=36, hidden_size=4096, intermediate_size=14400, num_heads=32, num_kv_heads=32, head_dim=128,
        vocab_size=50257, max_seq_len=2048,
    )  # fmt: skip
    params, found = dims.num_params, {}
    for name in TECHNIQUES:
        divided = DATA_PARALLEL.read(name).divided(64)
        found[name] = (
            divided.weights_bytes(dims, 2) + divided.gradient_bytes(dims, 2) + 8 * params / divided.of("optimizer")
        )
    assert found["ddp"] == pytest.approx((2 + 4 + 8 + 4) * params)
    assert found["zero1"] == pytest.approx((2 + 4 + 4 / 64 + 12 / 64) * params)
    assert DATA_PARALLEL.read("zero1").divided(64).gradient_bytes(dims, 1) == DATA_PARALLEL.read("zero2").divided(
        64
    ).gradient_bytes(dims, 1)
    ends = 2 * dims.vocab_size * dims.hidden_size
    layer = (params - ends) / 36
    in_flight = 4 * (ends / 2 + 2 * layer)  # the embedding's gradient, which comes last, and those of two layers
    assert found["zero2"] - (2 + 16 / 64) * params == pytest.approx(in_flight, rel=0.01)
    assert found["zero3"] < 2 * ends + (18 / 64) * params + in_flight + 2 * 2 * layer
    growth = [
        train_bytes(dims, batch_tokens=2048, seq_len=2048, dtype="bfloat16", device="cuda", divided=one).value
        for one in (None, *(DATA_PARALLEL.read(name).divided(64) for name in TECHNIQUES))
    ]
    assert growth[0] < growth[1] and growth[1:] == sorted(growth[1:], reverse=True)


def test_the_transfers_of_a_step():
    dims = SHAPE.config(256).dims()
    moved = {name: DATA_PARALLEL.read(name).divided(4).step_s(dims, "bfloat16", 2, "cuda") for name in TECHNIQUES}
    assert moved["zero1"] < moved["zero2"] < moved["zero3"]  # more sums, then more gathers
    hsdp = DATA_PARALLEL.read(HSDP).divided(4)
    assert hsdp == Divided(4, 2, DATA_PARALLEL["zero3"].sharded)


def test_what_cannot_be_divided_is_said(data_folder):
    from dataclasses import replace

    from hone.base.plan import facts_of
    from hone.measure.machine import describe

    facts = {"data": facts_of(Artifact.read(data_folder))}
    machine = describe("cpu").model_copy(update={"num_ranks": 3})
    with pytest.raises(SpecError, match="batch_size 4 is not divisible into 3 ranks x 1 micro-batches") as caught:
        Train.read(SPEC).plan(facts, machine)
    assert "multiple of 3" in caught.value.fix
    machine = machine.model_copy(update={"num_ranks": 4})
    with pytest.raises(SpecError, match="data_parallel_replicate_degree 3 does not divide 4 ranks"):
        spec = {**SPEC, "parallelism": {"data_parallel": {"kind": "zero1", "data_parallel_replicate_degree": 3}}}
        Train.read(spec).plan(facts, machine)
    with pytest.raises(SpecError, match="has no field 'data_parallel'") as caught:
        Train.read({**SPEC, "data_parallel": "zero1"})
    assert "parallelism.data_parallel" in caught.value.fix
    plan = Train.read(SPEC).plan(facts, machine)
    assert "transfers" in plan.estimates["time_s"].formula
    assert replace(Divided(4, 4), num_ranks=1).of("weights") == 1
