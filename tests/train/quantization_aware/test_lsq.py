"""Learned steps: their gradients, what is saved and exported, and a training that is resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hone
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.feed.load import Batch
from hone.ops.formats import code_range
from hone.ops.rounding.found_grid import grid_of
from hone.ops.rounding.integer_grid import Grid
from hone.ops.rounding.straight_through import fake_quantize
from hone.train import OBJECTIVES
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.quantization_aware import FAKE_QUANTIZERS
from hone.train.quantization_aware.fits import check_rounding
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.objectives.test_objectives import VOCAB, batch, model

LSQ = {"kind": "lsq", "bits": 3, "group_size": 16}
WIDE = SHAPE.model_copy(update={"hidden_size": 64, "num_layers": 2, "intermediate_size": 128})


def test_gradients_are_those_of_the_paper():
    """dL/ds = dL/dw^ (round(w/s) - w/s) inside, -Q_n or Q_p outside, times 1 / sqrt(N Q_p); dL/dw passes inside alone."""
    quantizer = FAKE_QUANTIZERS.read(LSQ)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 32, generator=draw).requires_grad_()
    steps = (torch.rand(3, 2, generator=draw) * 0.4 + 0.1).half().float().requires_grad_()
    slopes = torch.randn(3, 32, generator=draw)
    found = quantizer.with_steps(weight, steps)
    found.backward(slopes)
    low, high = code_range(3)
    assert (low, high) == (-4, 3)
    outside = 0
    for row in range(3):
        for group in range(2):
            step, wanted = float(steps[row, group]), 0.0
            for column in range(group * 16, group * 16 + 16):
                ratio = float(weight[row, column]) / step
                code, slope = round(ratio), float(slopes[row, column])
                inside = low <= code <= high
                outside += not inside
                wanted += slope * (code - ratio if inside else (low if code < low else high))
                assert float(found[row, column]) == pytest.approx(min(max(code, low), high) * step, rel=1e-6)
                assert float(weight.grad[row, column]) == (pytest.approx(slope, rel=1e-6) if inside else 0)
            assert float(steps.grad[row, group]) == pytest.approx(wanted / (16 * 3) ** 0.5, rel=1e-4, abs=1e-6)
    assert outside


def test_it_begins_as_the_paper_does_or_on_the_grid_that_is_there():
    quantizer = FAKE_QUANTIZERS.read(LSQ)
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    first = quantizer.first_steps(weight)
    wanted = 2 * weight.view(4, 2, 16).abs().mean(-1) / 3**0.5
    torch.testing.assert_close(first, wanted, rtol=1e-3, atol=0)
    rounded = quantizer.with_steps(weight, first)
    assert torch.equal(quantizer.rounded(rounded, (4,)), rounded)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_grid_is_found_from_its_points_alone(bits):
    draw = torch.Generator().manual_seed(bits)
    weight = torch.randn(40, 64, generator=draw)
    steps = (torch.rand(40, 4, generator=draw) * 0.3 + 1e-3).half()
    points = fake_quantize(weight, Grid(steps), bits)
    points[0, :16] = 0
    points[1, :16] = points[1, :16] * 0 + 3 * steps[1, 0].float() * (bits > 2)  # one multiple alone
    found = grid_of(points, bits, 16, torch.float16)
    assert found is not None and torch.equal(fake_quantize(points, found, bits), points)
    assert grid_of(weight, bits, 16, torch.float16) is None
    assert grid_of(points + 1e-3, bits, 16, torch.float16) is None


def test_the_saved_model_is_what_the_last_pass_computed_and_is_exported_bit_for_bit(data_folder, tmp_path):
    objective = {"kind": "next_token", "quantization_aware": LSQ}
    spec = {"model": WIDE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 4, "objective": objective}
    data = {"data": Artifact.read(data_folder)}
    made = Train.read(spec).make(tmp_path / "train-lsq", data, Run(quiet=True))
    step = FAKE_QUANTIZERS.read(LSQ).exported
    out = Compress.read({"steps": [step]}).make(tmp_path / "compress-lsq", {"model": made}, Run(quiet=True))
    ours, theirs = hone.load(made.folder), hone.load(out.folder)
    paths = [f"layers.{index}.{path}" for index in range(2) for path in ours.config.linears(index)]
    for path in paths:
        assert torch.equal(ours.get_submodule(path).weight, theirs.get_submodule(path).dequantize(torch.float32))
        assert len(ours.get_submodule(path).weight[0, :16].unique()) <= 8
    from hone.feed.load import PackedTokens
    from hone.train.objectives.preference.measure import validate

    val = PackedTokens(data_folder, "val")
    assert validate(theirs, val, batch_size=4, seq_len=32) == pytest.approx(made.figures["val_loss"].value, rel=1e-4)
    with pytest.raises(SpecError, match="its weights lie on no grid of 2 bits"):
        Compress.read({"steps": [{**step, "bits": 2}]}).make(tmp_path / "compress-2", {"model": made}, Run(quiet=True))


def test_a_resumed_training_is_the_one_that_was_not_ended(tmp_path):
    def trainer() -> Trainer:
        objective = OBJECTIVES.read({"kind": "next_token", "quantization_aware": LSQ})
        return Trainer(model(0), steps=4, schedule=Cosine(warmup=0), objective=objective)

    tokens, targets = batch()
    given = Batch(tokens.numpy(), targets.numpy(), np.zeros((3, 20), np.int32))
    whole, first, second = trainer(), trainer(), trainer()
    losses = [whole.step(given).loss for _ in range(4)]
    for _ in range(2):
        first.step(given)
    checkpoints = Checkpoints(tmp_path, keep=1)
    first.save(checkpoints)
    checkpoints.finish()
    found = checkpoints.newest()
    assert found is not None
    second.restore(*found)
    assert [second.step(given).loss for _ in range(2)] == losses[2:]
    for one, other in zip(second.linears.linears, whole.linears.linears, strict=True):
        assert torch.equal(one.computed(), other.computed()) and bool((one.steps[1] != 0).any())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "bf16"}, "precision bf16, in which"),
        ({"parallelism": {"data_parallel": "zero3"}}, "data_parallel zero3"),
        ({"parallelism": {"pipeline_parallel_degree": 2}, "gradient_accumulation_steps": 2}, "a pipeline"),
    ],
)
def test_what_does_not_fit_is_refused(fields, said):
    objective = {"kind": "next_token", "quantization_aware": LSQ}
    with pytest.raises(SpecError, match=said):
        check_rounding(Train.read({"objective": objective, **fields}), WIDE.config(VOCAB))
