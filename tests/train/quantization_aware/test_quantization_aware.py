"""Quantization-aware training: what is exported is what was trained, and it loses less than rounding afterwards."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hone
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress import QUANTIZERS
from hone.compress.stage import Compress
from hone.model.decoder import build
from hone.train.quantization_aware import FAKE_QUANTIZERS
from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.ranks import trained as trained_on_ranks

WIDE = SHAPE.model_copy(update={"hidden_size": 64, "num_layers": 2, "intermediate_size": 128})
SPEC = {"model": WIDE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 3}


def objective(**fields) -> dict:
    return {"objective": {"kind": "next_token", "quantization_aware": fields}}


def train(folder, data, **fields) -> Artifact:
    return Train.read({**SPEC, **fields}).make(folder, {"data": Artifact.read(data)}, Run(quiet=True))


def rounded(folder, quantizer, dtype) -> list[torch.Tensor]:
    """The weights of the layers' linears with which the trained model in `folder` would compute its next pass."""
    model = hone.load(folder).to(dtype)
    return [linear.computed().detach() for linear in RoundedLinears(model, quantizer).linears]


def exported(folder, quantizer, out, dtype) -> list[torch.Tensor]:
    """The same weights as they are stored by the compress stage."""
    spec = Compress.read({"steps": [quantizer.exported]})
    made = spec.make(out, {"model": Artifact.read(folder)}, Run(quiet=True))
    model = hone.load(made.folder)
    paths = [f"layers.{index}.{path}" for index in range(2) for path in model.config.linears(index)]
    return [model.get_submodule(path).dequantize(dtype) for path in paths]


KINDS = [
    {"kind": "integer", "bits": 4, "group_size": 32},
    {"kind": "integer", "bits": 8, "group_size": 0, "scale": "signed"},
    {"kind": "integer", "bits": 3, "group_size": 16, "symmetric": False},
    {"kind": "fp8"},
    {"kind": "nvfp4"},
    {"kind": "mxfp4"},
    {"kind": "mxfp8"},
]


def named(kind: dict) -> str:
    return "-".join(map(str, kind.values()))


@pytest.fixture(scope="module")
def trained(data_folder, tmp_path_factory) -> dict[str, Artifact]:
    """One training a precision; any grid can be compared on what it made."""
    folder = tmp_path_factory.mktemp("trained")
    return {
        precision: train(folder / f"train-{precision}", data_folder, precision=precision, **objective(**KINDS[0]))
        for precision in ("fp32", "bf16")
    }


CASES = [("fp32", kind) for kind in KINDS] + [("bf16", KINDS[0]), ("bf16", KINDS[2]), ("bf16", {"kind": "fp8"})]


@pytest.mark.parametrize(("precision", "kind"), CASES, ids=lambda one: one if isinstance(one, str) else named(one))
def test_what_is_exported_is_bit_for_bit_what_a_pass_computes_with(trained, precision, kind, tmp_path):
    quantizer, dtype = FAKE_QUANTIZERS.read(kind), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    ours = rounded(trained[precision].folder, quantizer, dtype)
    theirs = exported(trained[precision].folder, quantizer, tmp_path / "compress-made", dtype)
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_the_loss_of_the_training_is_that_of_the_exported_model(trained, data_folder, tmp_path):
    from hone.feed.load import PackedTokens
    from hone.train.objectives.preference.measure import validate

    made = trained["fp32"]
    step = FAKE_QUANTIZERS.read(KINDS[0]).exported
    out = Compress.read({"steps": [step]}).make(tmp_path / "compress-made", {"model": made}, Run(quiet=True))
    val = PackedTokens(data_folder, "val")
    found = validate(hone.load(out.folder), val, batch_size=4, seq_len=32)
    assert found == pytest.approx(made.figures["val_loss"].value, rel=1e-4)


def test_blocks_are_those_of_the_quantizer():
    weight = torch.randn(200, 160, generator=torch.Generator().manual_seed(0))
    ours = FAKE_QUANTIZERS.read({"kind": "fp8", "strategy": "block"})
    theirs = QUANTIZERS.read({"kind": "fp8", "strategy": "block", "activations": "none"}).nearest(weight)
    assert torch.equal(ours.rounded(weight, (200,)), theirs)
    assert "two of its modules" in ours.problem(160, (100, 100)) and ours.problem(160, (128, 72)) is None


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_gradients_are_those_of_the_rounded_weight(kind):
    """Straight through: where no weight is clamped its gradient is that of the weight of the product."""
    quantizer = FAKE_QUANTIZERS.read(kind)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slopes = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    found = quantizer.rounded(weight, (48,))
    assert not torch.equal(found, weight)
    found.backward(slopes)
    same = weight.grad == slopes
    assert bool(((weight.grad == 0) | torch.isclose(weight.grad, slopes)).all())
    assert same.float().mean() > (0.8 if kind["kind"] == "integer" else 0.999)


def test_inputs_are_rounded_as_products_of_codes_have_them():
    quantizer = FAKE_QUANTIZERS.read({"kind": "integer", "group_size": 32, "activations": "int8_token"})
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = quantizer.rounded_inputs(x)
    steps = found / (x.abs().amax(-1, keepdim=True) / 127.5)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    found.sum().backward()
    assert x.grad.eq(1).all() and (found - x).abs().max() > 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "fp16"}, "precision fp16"),
        ({"precision": "bf16", "checkpoint": {"export_dtype": "float32"}}, "weights saved in float32"),
        (
            {"objective": {"kind": "next_token", "quantization_aware": "integer"}},
            "group_size 128 does not divide its 64",
        ),
        (
            {"objective": {"kind": "next_token", "quantization_aware": "fp8", "simulated_device": "analog"}},
            "objective.simulated_device",
        ),
    ],
)
def test_what_would_export_another_model_is_refused(data_folder, tmp_path, fields, said):
    given = {**objective(kind="fp8"), **fields}
    with pytest.raises(SpecError, match=said) as caught:
        train(tmp_path / "train-refused", data_folder, **given)
    assert "objective.quantization_aware" in str(caught.value)


def test_recomputed_and_accumulated_passes_give_the_same_weights(data_folder, tmp_path):
    from safetensors.torch import load_file

    how = objective(kind="integer", group_size=32)
    plain = train(tmp_path / "train-plain", data_folder, **how)
    again = train(tmp_path / "train-again", data_folder, **how, activation_checkpointing="full")
    one, other = (load_file(made.folder / "model.safetensors") for made in (plain, again))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6)


def test_ranks_round_the_weights_that_one_process_rounds(data_folder, tmp_path):
    """One step, after which rounding starts from weights that differ by the rounding of sums in another order."""
    rounds = {
        "model": {"num_layers": 2},
        "distill": {"quantization_aware": {"kind": "integer", "group_size": 0}},
        "until": 1,
    }
    ways = [{"data_parallel": "zero3"}, {"parallelism": {"pipeline_parallel_degree": 2}, "layers": [(0, 1), (1, 2)]}]
    more = {"gradient_accumulation_steps": 2}
    [[alone]] = on_ranks(1, trained_on_ranks, str(data_folder), str(tmp_path), [rounds])
    whole = torch.load(tmp_path / "0-1-0.pt")
    settings = [rounds | more | one for one in ways]
    for rank, losses in enumerate(on_ranks(2, trained_on_ranks, str(data_folder), str(tmp_path), settings)):
        for number in range(2):
            np.testing.assert_allclose(losses[number], alone, rtol=1e-5)
            for name, found in torch.load(tmp_path / f"{number}-2-{rank}.pt").items():
                torch.testing.assert_close(found, whole[name], rtol=1e-5, atol=2e-6)


def test_a_copy_of_a_model_is_not_changed():
    model = build(WIDE.config(40))
    before = [parameter.clone() for parameter in model.parameters()]
    RoundedLinears(copy.deepcopy(model), FAKE_QUANTIZERS.read("fp8"))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
