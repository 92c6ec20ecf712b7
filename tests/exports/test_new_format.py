"""A new export format is one file and one line in the table: NumPy archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hone
from hone.base.errors import SpecError
from hone.base.table import all_tables
from hone.cli import main
from hone.cli.completion.known import options_of
from hone.exports import EXPORTS
from hone.model.hf import load, state


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table line."""
    monkeypatch.setitem(EXPORTS.rows, "npz", "tests.exports.extensions.npz:NPZ")


def test_the_command_line_writes_it(family_folder, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, out = family_folder("llama"), tmp_path / "model.npz"
    assert main(["export", str(folder), f"--out={out}", "--format=npz", "--dtype=float16", "--quiet"]) == 0
    assert f"{out}: " in capsys.readouterr().out
    with np.load(out) as arrays:
        weights = dict(state(load(folder)))
        assert set(arrays) == set(weights)
        for name, weight in weights.items():
            assert arrays[name].dtype == np.float16
            assert np.array_equal(arrays[name], weight.to(torch.float16).numpy())


def test_its_options_help_and_place_come_with_the_line(
    family_folder, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["export", "--format=npz", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--dtype=float32|float16" in said and "One NumPy archive" in said and "--type" not in said
    assert "npz" in all_tables()["export format"]
    assert {"dtype", "type", "format"} <= {option.name for option in options_of("export")}
    with pytest.raises(SpecError, match=r"does not end in .npz"):
        hone.export(family_folder("llama"), tmp_path / "model.gguf", format="npz")
    with pytest.raises(SpecError, match="no_such"):
        hone.export(family_folder("llama"), tmp_path / "model.npz", format="npz", no_such=1)
    with pytest.raises(SpecError, match="unknown export format 'onnx'"):
        hone.export(family_folder("llama"), tmp_path / "model.onnx", format="onnx")


def test_a_quantized_folder_and_a_file_that_is_there(family_folder, compress, tmp_path: Path) -> None:
    made = compress(family_folder("llama"), {"kind": "rtn", "bits": 8, "group_size": 32})
    out = hone.export(made.folder, tmp_path / "model.npz", format="npz")
    assert out.notes == ["quantized weights are dequantized"] and out.num_bytes == out.path.stat().st_size
    name = "model.layers.0.self_attn.o_proj.weight"
    with np.load(out.path) as arrays:
        wanted = load(made.folder).layers[0].mixer.out.dequantize(torch.float32).numpy()
        assert np.array_equal(arrays[name], wanted)
    with pytest.raises(hone.HoneError, match=r"model.npz exists"):
        hone.export(made.folder, tmp_path / "model.npz", format="npz")
