"""An adapter inside the rounding: what is merged and exported afterwards is bit for bit what the last pass computed with."""

from __future__ import annotations

import pytest
import torch

import hone
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.exports.merged.write import merge
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.model.hf import save
from hone.train.quantization_aware import FAKE_QUANTIZERS
from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.stage import Train
from tests.train.conftest import SHAPE

GRID = {"kind": "integer", "bits": 4, "group_size": 32}
WIDE = SHAPE.model_copy(update={"hidden_size": 64, "num_layers": 2, "intermediate_size": 128})
SPEC = {
    "adapter": {"kind": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "objective": {"kind": "next_token", "quantization_aware": GRID},
    "optimizer": {"kind": "adamw", "lr": 1e-2},
    "batch_size": 4,
    "seq_len": 32,
    "steps": 4,
}


@pytest.fixture(scope="module")
def base(data_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save(build(WIDE.config(PackedTokens(data_folder).vocab_size), seed=1), folder, tokenizer_from=data_folder)
    return folder


def inputs(base, data_folder) -> dict[str, Artifact]:
    return {"data": Artifact.read(data_folder), "model": Artifact.read(base)}


def test_the_merged_model_is_exported_as_it_was_trained(base, data_folder, tmp_path):
    made = Train.read(SPEC).make(tmp_path / "train-lora", inputs(base, data_folder), Run(quiet=True))
    quantizer = FAKE_QUANTIZERS.read(GRID)
    model = hone.load(made.folder)
    ours = [linear.computed().detach() for linear in RoundedLinears(model, quantizer).linears]
    unadapted = [linear.computed().detach() for linear in RoundedLinears(hone.load(base), quantizer).linears]
    assert len(ours) == len(unadapted) == 8
    assert any(not torch.equal(one, other) for one, other in zip(ours, unadapted, strict=True))
    merged = merge(made.folder, tmp_path / "merged")
    spec = Compress.read({"steps": [quantizer.exported]})
    out = spec.make(tmp_path / "compress-lora", {"model": Artifact.read(merged.path)}, Run(quiet=True))
    theirs = hone.load(out.folder)
    found = [theirs.get_submodule(f"layers.{at}.{path}") for at in range(2) for path in theirs.config.linears(at)]
    order = {tuple(one.shape): [] for one in ours}
    for one in ours:
        order[tuple(one.shape)].append(one)
    for linear in found:
        weight = linear.dequantize(torch.float32)
        assert any(torch.equal(weight, one) for one in order[tuple(weight.shape)])


def test_gradients_reach_the_factors_through_the_rounding(base):
    """Straight through: that of B is s g A^T, with g the gradient of the rounded weight, where nothing is clamped."""
    from hone.model.adapters.trainable import Trainable
    from hone.model.hf import Checkpoint

    spec = Train.read(SPEC)
    model = Trainable(Checkpoint(base), spec.adapter, 0).build("cpu", torch.float32)
    linears = RoundedLinears(model, FAKE_QUANTIZERS.read({"kind": "fp8"})).linears
    linear = next(one for one in linears if hasattr(one, "lora_A_q"))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    slopes = torch.randn(3, linear.out_features, generator=torch.Generator().manual_seed(1))
    linear(x).backward(slopes)
    gradient = (slopes.T @ x)[: len(linear.lora_B_q)]
    wanted = linear.spec.scale * gradient @ linear.lora_A_q.detach().T
    torch.testing.assert_close(linear.lora_B_q.grad, wanted, rtol=1e-4, atol=1e-5)
    assert linear.inner.weight.grad is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "bf16"}, "precision bf16, in which a merge"),
        ({"adapter": {"kind": "lora", "dropout": 0.1}}, "is not rounded"),
        ({"adapter": {"kind": "dora"}}, "is not rounded: 1 adapters, dora"),
        (
            {"objective": {"kind": "next_token", "quantization_aware": {"kind": "lsq", "group_size": 32}}},
            "learned steps",
        ),
    ],
)
def test_what_would_not_be_merged_as_it_was_is_refused(fields, said, base, data_folder, tmp_path):
    with pytest.raises(SpecError, match=said):
        Train.read({**SPEC, **fields}).make(tmp_path / "train-no", inputs(base, data_folder), Run(quiet=True))
