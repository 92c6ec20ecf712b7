"""NVFP4, MXFP4 and MXFP8 as stored: against compressed-tensors, by hand, and in the linear that runs them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import ArtifactError
from hone.model.quantized import config as config_of
from hone.model.quantized import layouts
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.scheme import Quantization, Scheme

SCHEMES = {
    "nvfp4": Scheme(4, 16, "nvfp4-pack-quantized", number="e2m1", scales="e4m3"),
    "mxfp4": Scheme(4, 32, "mxfp4-pack-quantized", number="e2m1", scales="e8m0"),
    "mxfp8": Scheme(8, 32, "mxfp8-quantized", number="e4m3", scales="e8m0"),
}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make_stored(scheme: Scheme, rows: int, columns: int, seed: int = 0):
    """A random weight rounded on random scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    grid = scheme.grid(rows, columns)
    if scheme.scales == "e4m3":
        scales = (torch.rand(grid, generator=generator) * 400 + 20).to(torch.float8_e4m3fn)
        return scheme.quantize(weight, scales, None, torch.rand(1, generator=generator) * 9000 + 5000)
    low = 118 if scheme.bits == 4 else 112
    scales = torch.randint(low, low + 5, grid, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scheme.quantize(weight, scales)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_bytes_of_a_file_by_hand(name: str) -> None:
    scheme, stored = SCHEMES[name], make_stored(SCHEMES[name], 6, 64)
    part, weight = layouts.write(stored), stored.weight(torch.float32)
    for row in range(6):
        for column in range(64):
            scale = part["weight_scale"][row, column // scheme.group_size]
            if name == "mxfp8":
                code = float(part["weight"][row, column])
            else:
                byte = int(part["weight_packed"][row, column // 2])
                nibble = byte >> 4 if column % 2 else byte & 15
                code = VALUES[nibble & 7] * (-1 if nibble & 8 else 1)
            if name == "nvfp4":
                step = scale.float() / part["weight_global_scale"][0]
            else:
                step = torch.tensor(2.0 ** (int(scale) - 127))
            assert weight[row, column] == code * step
    entries = layouts.tensors_of(scheme, 6, 64, torch.bfloat16)
    assert {suffix: (one.dtype, tuple(one.shape)) for suffix, one in part.items()} == entries


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_decompresses_to_the_same_weights(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    scheme, stored = SCHEMES[name], make_stored(SCHEMES[name], 8, 96)
    group = config_of.to_json(Quantization(((("Linear",), scheme),)))["config_groups"]["group_0"]
    theirs = quantization.QuantizationScheme.model_validate(group)
    back = BaseCompressor.get_value_from_registry(scheme.layout).decompress(layouts.write(stored), theirs)["weight"]
    assert torch.equal(back.float(), stored.weight(torch.bfloat16).float())


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_writes_the_same_bytes(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    from hone.ops.rounding import float_grid

    scheme = SCHEMES[name]
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(4)) * 0.1
    divisor = float_grid.global_scale_of(weight) if name == "nvfp4" else None
    scales = float_grid.find_scales(weight, scheme.number, scheme.group_size, "absmax", divisor=divisor)
    ours = layouts.write(scheme.quantize(weight, scales, None, divisor))
    group = config_of.to_json(Quantization(((("Linear",), scheme),)))["config_groups"]["group_0"]
    theirs = quantization.QuantizationScheme.model_validate(group)
    given = {"weight": weight, "weight_scale": scales.float()}
    given |= {} if divisor is None else {"weight_global_scale": divisor}
    made = BaseCompressor.get_value_from_registry(scheme.layout).compress(given, theirs)
    for suffix in ("weight_packed" if scheme.bits == 4 else "weight", "weight_scale"):
        theirs_bytes, ours_bytes = made[suffix].view(torch.uint8), ours[suffix].view(torch.uint8)
        if suffix == "weight_packed":  # a negative number that is rounded to zero: -0 there or here
            for nibble in (0, 4):
                one, two = (theirs_bytes >> nibble) & 15, (ours_bytes >> nibble) & 15
                assert torch.equal(torch.where(one == 8, 0, one), torch.where(two == 8, 0, two))
        else:
            assert torch.equal(theirs_bytes, ours_bytes), suffix


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("tile", [1 << 20, 300])
def test_the_linear_runs_modules_with_global_scales_of_their_own(name: str, tile: int, monkeypatch) -> None:
    from hone.model.quantized import dequantizing

    monkeypatch.setitem(dequantizing.TILE_VALUES, "cpu", tile)
    scheme, rows = SCHEMES[name], [8, 4, 6]
    stored = [make_stored(scheme, count, 96, seed) for seed, count in enumerate(rows)]
    parts = [layouts.write(one) for one in stored]
    with torch.device("meta"):
        module = Dequantizing(96, sum(rows), False, scheme=scheme)
    module.load(parts)
    weight = torch.cat([one.weight(torch.float32) for one in stored])
    assert torch.equal(module.dequantize(torch.float32), weight)
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(module(x), F.linear(x, weight), atol=1e-5)
    for before, after, shapes in zip(parts, module.parts(rows), module.part_shapes(rows), strict=True):
        assert before.keys() == after.keys() == shapes.keys()
        for suffix, tensor in before.items():
            assert tensor.dtype == after[suffix].dtype and tuple(tensor.shape) == shapes[suffix]
            assert torch.equal(tensor.view(torch.uint8), after[suffix].view(torch.uint8))
    again = module.to(torch.bfloat16).parts(rows)[0]
    assert all(
        torch.equal(again[suffix].float(), tensor.float())
        for suffix, tensor in parts[0].items()
        if "global" not in suffix
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_survives_its_own_json(name: str) -> None:
    config = Quantization(((("Linear",), SCHEMES[name]),), ("lm_head",))
    values = config_of.to_json(config)
    assert config_of.read(values) == config
    del values["config_groups"]["group_0"]["weights"]["scale_dtype"]  # older files do not state it
    assert config_of.read(values) == config
    values["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.float16"
    with pytest.raises(ArtifactError, match=r"weights\.scale_dtype"):
        config_of.read(values)


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_of_another_dtype_are_refused(name: str) -> None:
    part = layouts.write(make_stored(SCHEMES[name], 8, 96))
    part["weight_scale"] = part["weight_scale"].float()
    with pytest.raises(ArtifactError, match=r"weight_scale of a quantized weight is torch\.float32"):
        layouts.read(SCHEMES[name], part, 96)
