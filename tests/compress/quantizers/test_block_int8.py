"""Int8 in blocks of rows and columns against its definition, block by block; what is stored, and shapes that blocks do not divide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.exports.api import export
from tests.compress.written.test_export_loaders import SIZES, tensors_of


def matrix(rows: int = 128, columns: int = 192, dtype: torch.dtype = torch.float32) -> Matrix:
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weights[70, 130] = 40.0
    weights[:64, :64] = 0
    return Matrix("m", weights, dtype)


@pytest.mark.parametrize("size", [64, 32])
def test_every_block_has_one_scale_and_each_weight_is_its_nearest_step(size: int) -> None:
    made = matrix()
    QUANTIZERS.read({"kind": "block_int8", "block_size": size, "scale_dtype": "float32"}).apply(made)
    assert made.stored is not None and made.stored.scales.shape == (128 // size, 192 // size)
    for top in range(0, 128, size):
        for left in range(0, 192, size):
            block = made.original[top : top + size, left : left + size]
            largest = block.abs().max()
            scale = largest * (2 / 255) if largest > 0 else torch.tensor(1.0)
            codes = (block / scale).round().clamp(-128, 127)
            assert torch.equal(made.stored.codes[top : top + size, left : left + size], codes.to(torch.int8))
            torch.testing.assert_close(made.weight[top : top + size, left : left + size], codes * scale)


def test_an_outlier_costs_its_own_block_alone_and_a_search_never_costs_more() -> None:
    """With one scale a matrix the outlier would set the steps of all; a searched scale may cut it off."""
    errors = {}
    for scale in ("absmax", "signed", "search"):
        made = matrix()
        QUANTIZERS.read({"kind": "block_int8", "scale": scale, "scale_dtype": "float32"}).apply(made)
        errors[scale] = made.errors().weight
        rest = (made.weight - made.original)[:64]
        assert rest.abs().max() <= 0.51 * made.stored.scales[0].abs().max(), scale
    assert errors["search"] <= errors["absmax"]


def test_a_folder_has_8_bits_and_a_scale_a_block_as_planned(family_folder, compress) -> None:
    made = compress(family_folder("llama", **SIZES), {"kind": "block_int8"})
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    group = json.loads((made.folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == "int-quantized" and group["weights"]["block_structure"] == [64, 64]
    stored = {name: one for name, one in tensors_of(made.folder).items() if ".layers." in name and "norm" not in name}
    weights = sum(one.numel() for name, one in stored.items() if name.endswith(".weight"))
    bits = 8 * sum(one.numel() * one.itemsize for one in stored.values())
    assert bits == weights * (8 + 16 / 4096)


def test_llama_cpp_gets_the_codes_as_they_are(family_folder, compress, tmp_path: Path) -> None:
    """Blocks of 32 columns or more hold whole blocks of q8_0, with the scale of their rows."""
    step = {"kind": "block_int8", "scale_dtype": "float16"}
    made = compress(family_folder("llama", **SIZES), step, engine="llama.cpp")
    out = export(made.folder, tmp_path / "model.gguf")
    assert any("14 matrices keep the codes of the folder, without loss" in note for note in out.notes)


@pytest.mark.parametrize(
    ("rows", "columns", "way_out"),
    [(96, 128, "use block_size 32 or 16 or 8"), (128, 100, "group_size=0"), (64, 72, "use block_size 8,")],
)
def test_shapes_that_blocks_do_not_divide_are_refused(rows: int, columns: int, way_out: str) -> None:
    step = QUANTIZERS.read({"kind": "block_int8"})
    with pytest.raises(SpecError, match=rf"blocks of 64 x 64 do not divide m, {rows} x {columns}[^$]*{way_out}"):
        step.check("m", rows, columns)


def test_a_block_over_two_modules_of_one_matrix_is_refused(family_folder, compress) -> None:
    """Keys and values have 32 rows each here: q, k and v stacked are 128, but blocks of 64 would lie in k and v."""
    with pytest.raises(
        SpecError, match=r"blocks of 64 x 64 do not divide \S*k_proj, 32 x 64[^$]*use block_size 32 or 16 or 8"
    ):
        compress(family_folder("llama"), {"kind": "block_int8"}, ignore=["lm_head", "mlp"])
