"""The dtype of saved weights: float32 masters on request, rounded once otherwise, and the record says which."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.train.stage import Train
from hone.train.start import starting_models
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.ranks import trained

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 6,
    "precision": "bf16",
    "validation": {"sequences": 4},
    "optimizer": {"lr": 3e-3},
}
QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def both(data_folder, tmp_path_factory):
    """{dtype: the artifact that is saved in it}; None: the default."""
    folder, data = tmp_path_factory.mktemp("line"), {"data": Artifact.read(data_folder)}
    return {
        dtype: Train.read({**SPEC, "checkpoint": {"export_dtype": dtype}}).make(folder / f"train-{dtype}", data, QUIET)
        for dtype in (None, "float32")
    }


def test_float32_keeps_what_bfloat16_rounds(both):
    rounded, kept = (load_file(one.folder / "model.safetensors") for one in both.values())
    assert {one.dtype for one in kept.values()} == {torch.float32} and {one.dtype for one in rounded.values()} == {
        torch.bfloat16
    }
    assert all(torch.equal(kept[name].bfloat16(), rounded[name]) for name in rounded)
    flat = torch.cat([one.double().flatten() for one in kept.values()])
    error = (flat - flat.bfloat16().double()).norm() / flat.norm()
    figures = both[None].figures
    assert figures["rounding_error"].value == pytest.approx(float(error), rel=1e-5) and 0 < error < 2**-8
    assert figures["model_bytes"].note.startswith("saved in bfloat16, rounded from float32 masters")
    figures = both["float32"].figures
    assert "rounding_error" not in figures
    assert figures["model_bytes"].note == "saved in float32; losses are those of the weights in bfloat16"
    assert figures["model_bytes"].estimate.value == 2 * both[None].figures["model_bytes"].estimate.value
    assert figures["model_bytes"].error == pytest.approx(0, abs=0.05)
    assert json.loads((both["float32"].folder / "config.json").read_text())["torch_dtype"] == "float32"
    assert both[None].figures["val_loss"].value == figures["val_loss"].value


def test_models_of_the_middle_are_saved_alike_and_change_nothing(both, data_folder, tmp_path):
    """The masters are the parameters only while a model is written: the steps after it are those of a training without."""
    checkpoint = {"export_dtype": "float32", "keep": {"last": 2, "interval": 3}}
    spec = Train.read({**SPEC, "checkpoint": checkpoint})
    made = spec.make(tmp_path / "train-kept", {"data": Artifact.read(data_folder)}, QUIET)
    end = load_file(made.folder / "model.safetensors")
    middle, last = (
        load_file(made.folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (3, 6)
    )
    for name, weight in load_file(both["float32"].folder / "model.safetensors").items():
        assert torch.equal(weight, end[name]) and torch.equal(weight, last[name])
    assert {one.dtype for one in middle.values()} == {torch.float32}
    assert any((one != one.bfloat16().float()).any() for one in middle.values())
    disk = made.figures["disk_bytes"].estimate.value - both["float32"].figures["disk_bytes"].estimate.value
    assert disk > 2 * made.figures["model_bytes"].estimate.value


def test_a_continued_run_begins_with_the_masters(both, tmp_path):
    kept = load_file(both["float32"].folder / "model.safetensors")
    spec = Train.read({**SPEC, "precision": "bf16"})
    model, _ = starting_models(spec, {"model": both["float32"]}, None, Run(quiet=True), state=tmp_path)
    assert torch.equal(model.embedding, kept["model.embed_tokens.weight"])


def test_the_dtype_of_saved_weights_is_part_of_the_identity():
    spec, other = Train.read(SPEC), Train.read({**SPEC, "checkpoint": {"export_dtype": "float32", "interval": 3}})
    assert "checkpoint" not in spec.identity()
    of_other = other.identity()["checkpoint"]
    assert of_other["export_dtype"] == "float32" and "interval" not in of_other
    assert {**other.identity(), "checkpoint": None} == {**spec.identity(), "checkpoint": None}


def test_every_division_gathers_the_masters(data_folder, tmp_path):
    """Weights as they compute are the gathered masters rounded, to the bit, on both ranks."""
    layouts = [
        {"data_parallel": "ddp"},
        {"data_parallel": "zero1"},
        {"data_parallel": "zero3", "optimizer": "muon"},
        {"parallelism": {"tensor_parallel_degree": 2}},
        {"parallelism": {"pipeline_parallel_degree": 2}, "gradient_accumulation_steps": 2, "tied": True},
    ]
    settings = [{**one, "precision": "bf16", "widen": wide} for one in layouts for wide in (False, True)]
    ended = together(2, trained, str(data_folder), str(tmp_path), settings)
    assert all(one.returncode == 0 for one in ended)
    for number, layout in enumerate(layouts):
        for rank in range(2):
            rounded, kept = (torch.load(tmp_path / f"{2 * number + wide}-2-{rank}.pt") for wide in (0, 1))
            assert {one.dtype for one in kept.values()} == {torch.float32}, layout
            assert all(torch.equal(kept[name].bfloat16(), rounded[name]) for name in rounded), layout
            assert any((kept[name] != rounded[name].float()).any() for name in rounded)
