"""Scales of small weights: a model whose layers are scaled by powers of two computes the same, and quantizes as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.model import hf
from hone.ops.rounding.integer_grid import float16_holds, stored

SMALL = 2.0**-20


@pytest.fixture
def rescaled(family_folder, tmp_path: Path) -> tuple[Path, Path]:
    """(a model, the same with the first layer's up projection times 2^-20 and its down projection times 2^20)."""
    source = family_folder("llama")
    folder = tmp_path / "rescaled"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= SMALL
    tensors["model.layers.0.mlp.down_proj.weight"] /= SMALL
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return source, folder


@pytest.mark.parametrize(
    "step",
    [
        {"kind": "rtn", "group_size": 32},
        {"kind": "rtn", "group_size": 32, "scale": "search", "symmetric": False},
        {"kind": "gptq", "group_size": 32},
        {"kind": "hqq", "group_size": 32},
        {"kind": "fp8"},
    ],
)
def test_float16_scales_give_way_where_they_do_not_hold(step: dict, rescaled, compress) -> None:
    source, folder = rescaled
    tokens = torch.arange(24).view(1, -1)
    made = {name: compress(one, step, name=name).folder for one, name in ((source, "plain"), (folder, "scaled"))}
    with torch.no_grad():
        dense = hf.load(source, dtype=torch.float32)(tokens)
        errors = [float((hf.load(one, dtype=torch.float32)(tokens) - dense).norm()) for one in made.values()]
    assert errors[1] < 1.3 * errors[0]
    rows = [json.loads(line) for line in (made["scaled"] / "layers.jsonl").read_text().splitlines()]
    noted = {row["name"] for row in rows if any("bfloat16" in note for note in row["notes"])}
    assert noted and all("feed_forward" in name and "layers.0" in name for name in noted)


def test_a_format_with_float16_scales_alone_refuses_them(rescaled, compress) -> None:
    _, folder = rescaled
    for more in ({"layout": "gptq"}, {"scale_dtype": "float16"}):
        with pytest.raises(
            SpecError, match=r"float16 cannot hold the scales of model.layers.0.feed_forward.\w+"
        ) as caught:
            compress(folder, {"kind": "rtn", "group_size": 32, **more}, name=str(len(more)))
        assert "ignore" in caught.value.fix


def test_a_group_next_to_nothing_asks_for_no_other_format() -> None:
    weights = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weights[3] *= 1e-9
    weights[5] = 0
    matrix = Matrix("m", weights, torch.float32)
    QUANTIZERS.read({"kind": "rtn", "group_size": 32, "layout": "gptq"}).apply(matrix)
    assert matrix.stored.scales.dtype == torch.float16 and not matrix.notes


def test_subnormal_numbers_of_float16_are_scales() -> None:
    scales = torch.tensor([3e-6, -3e-6, 0.0, 1e-9, 1e9])
    held = stored(scales, torch.float16)
    assert torch.allclose(held[:2].float(), scales[:2], rtol=0.02)
    assert held[2] == 1 and held[3] == 2.0**-24 and held[4] == 65504
    assert float16_holds(torch.full((4,), 3e-6)) and not float16_holds(torch.full((4,), 5e-7))
    assert not float16_holds(torch.full((4,), 7e4))
