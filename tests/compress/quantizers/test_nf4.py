"""NF4 and FP4 against bitsandbytes, byte for byte, and against the definition, a weight at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.model.quantized.layouts import layout_of
from hone.ops.nf4.reference import dynamic_map
from hone.ops.rounding.numbers import NUMBERS


def matrix(rows: int = 96, columns: int = 192, dtype: torch.dtype = torch.float32, modules: tuple = ()) -> Matrix:
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights[3] = 0
    weights[5, 64:128] *= 1000
    return Matrix("m", weights.float(), dtype, modules=modules)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_every_weight_gets_the_nearest_value_of_its_block(kind: str) -> None:
    made = matrix()
    QUANTIZERS.read({"kind": kind}).apply(made)
    table = torch.tensor(NUMBERS[kind].values, dtype=torch.float64)
    for row in range(0, 96, 5):
        for block in range(3):
            weights = made.original[row, block * 64 : block * 64 + 64].double()
            largest = weights.abs().max()
            near = ((weights / largest.clamp(min=1e-30)).unsqueeze(1) - table).abs().argmin(1)
            assert torch.allclose(
                made.weight[row, block * 64 : block * 64 + 64].double(), table[near] * largest, rtol=1e-6
            )
    assert made.stored.scheme.group_size == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("block_size", [64, 32])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_files_are_those_of_bitsandbytes(kind: str, block_size: int, double_quant: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    rows = (48, 32, 16)  # q, k and v of one matrix: their scales are rounded apart
    made = matrix(dtype=dtype, modules=rows)
    QUANTIZERS.read({"kind": kind, "block_size": block_size, "double_quant": double_quant}).apply(made)
    begin = 0
    for count in rows:
        here = slice(begin, begin + count)
        begin += count
        stored = made.stored.rows(here)
        ours = layout_of(stored.scheme).write(stored)
        packed, state = functional.quantize_4bit(
            made.original[here].to(dtype), blocksize=block_size, quant_type=kind, compress_statistics=double_quant
        )
        theirs = {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            if "quant_state" in name:  # ours is padded with spaces
                assert json.loads(bytes(ours[name].tolist())) == json.loads(bytes(tensor.tolist()))
            elif name == "weight.absmax" and double_quant:
                scales = matrix(dtype=dtype).original[here].view(-1, block_size).abs().amax(1)
                assert torch.equal(tensor, nearest_scales(scales, on_a_grid=True))
                assert torch.equal(ours[name], nearest_scales(scales, on_a_grid=False))
            else:
                assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
        read = functional.QuantState.from_dict(
            {key.removeprefix("weight."): value for key, value in ours.items() if key != "weight"}, torch.device("cpu")
        )
        assert read.nested == double_quant
        assert torch.equal(stored.weight(dtype), functional.dequantize_4bit(ours["weight"], read))


def nearest_scales(scales: torch.Tensor, on_a_grid: bool) -> torch.Tensor:
    """Codes of scales [n] in blocks of 256 by their definition: the nearest value of the dynamic map.

    bitsandbytes' CPU kernel (not its CUDA kernel) first rounds to a grid of 65536 steps, for a table look-up.
    """
    table, offset, codes = dynamic_map().double(), scales.mean(), []
    for block in (scales - offset).split(256):
        steps = block / block.abs().max()
        if on_a_grid:
            steps = ((steps + 1) * 32767.5 + 0.5).floor() / 32767.5 - 1
        codes.append((steps.double().unsqueeze(1) - table).abs().argmin(1).to(torch.uint8))
    return torch.cat(codes)


def test_rounded_scales_take_fewer_bytes_and_are_estimated_exactly(family_folder, compress) -> None:
    plain, rounded = (
        compress(family_folder("llama"), {"kind": "nf4", "block_size": 32, "double_quant": double}, name=str(double))
        for double in (False, True)
    )
    for made in (plain, rounded):
        assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    weights = sum(tensor.numel() for tensor in _absmax(plain.folder))
    assert sum(tensor.nbytes for tensor in _absmax(plain.folder)) == 4 * weights
    assert sum(tensor.nbytes for tensor in _absmax(rounded.folder)) == weights
    block = json.loads((rounded.folder / "config.json").read_text())["quantization_config"]
    assert block["bnb_4bit_use_double_quant"] and block["bnb_4bit_compute_dtype"] == "float32"
    assert block["bnb_4bit_blocksize"] == 32 and block["llm_int8_skip_modules"] == ["lm_head"]


def _absmax(folder: Path) -> list[torch.Tensor]:
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return [tensor for name, tensor in found.items() if name.endswith("weight.absmax")]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_impossible_options_say_what_is_possible(kind: str) -> None:
    with pytest.raises(SpecError, match="blocks of 64 do not divide the 96") as caught:
        QUANTIZERS.read({"kind": kind}).check("layers.0.mixer.qkv", 64, 96)
    assert caught.value.fix == "use block_size 32"
    with pytest.raises(SpecError, match="float32 scales, not bfloat16"):
        QUANTIZERS.read({"kind": kind, "scale_dtype": "bfloat16"}).check("layers.0.mixer.qkv", 64, 128)
    with pytest.raises(SpecError, match="block_size"):
        QUANTIZERS.read({"kind": kind, "block_size": 48})
