"""Dequantizing against a dense layer of the same weights, for every scheme that PackedInt does not run; schemes in config.json."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized import config as config_of
from hone.model.quantized import dequantizing
from hone.model.quantized.config import linear_of
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.layouts import layout_of, problem
from hone.model.quantized.scheme import Quantization, Scheme
from hone.ops import formats

FP8 = {"layout": "float-quantized", "number": "e4m3"}
INT8 = {"layout": "int-quantized"}
SCHEMES = {
    "fp8 channel": Scheme(8, **FP8),
    "fp8 tensor": Scheme(8, per_tensor=True, **FP8),
    "fp8 group": Scheme(8, 32, **FP8),
    "fp8 block": Scheme(8, block=(4, 40), **FP8),
    "int8 tensor": Scheme(8, per_tensor=True, **INT8),
    "int8 block": Scheme(8, block=(4, 40), **INT8),
    "int8 group asymmetric": Scheme(8, 32, symmetric=False, **INT8),
    "int8 tensor asymmetric": Scheme(8, per_tensor=True, symmetric=False, **INT8),
    "int4 group asymmetric": Scheme(4, 32, symmetric=False),
    "int3 channel asymmetric": Scheme(3, symmetric=False),
}


def make_parts(scheme: Scheme, rows: list[int], columns: int):
    """Checkpoint modules quantized from random weights, and the weights [N, K] float64 that they stand for."""
    generator = torch.Generator().manual_seed(0)
    low, high = formats.code_range(scheme.bits)
    parts, weights = [], []
    for count in rows:
        weight = torch.randn(count, columns, generator=generator, dtype=torch.float64)
        grid = scheme.grid(count, columns)
        points = None if scheme.symmetric else torch.randint(low, high + 1, grid, generator=generator).to(torch.int8)
        scales = torch.rand(grid, generator=generator) * 0.2 + 0.05
        stored = scheme.quantize(weight, scales, points)
        parts.append(layout_of(scheme).write(stored))
        values = stored.weight(torch.float64)
        for row in range(count):  # by hand, a number at a time
            for column in range(0, columns, 7):
                block = row // scheme.extent(count, columns)[0], column // scheme.extent(count, columns)[1]
                code = stored.codes[row, column].double() - (0 if points is None else points[block].double())
                assert values[row, column] == code * scales[block].double()
        weights.append(values)
    return parts, torch.cat(weights)


def make_module(scheme: Scheme, parts: list, rows: list[int], columns: int, bias: bool = False) -> Dequantizing:
    with torch.device("meta"):
        module = Dequantizing(columns, sum(rows), bias, scheme=scheme)
    module.load(parts)
    return module


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [[8, 4, 6], [7]])
@pytest.mark.parametrize("tile", [1 << 20, 300])
def test_forward_equals_the_dense_layer(name: str, rows: list[int], tile: int, monkeypatch) -> None:
    monkeypatch.setitem(dequantizing.TILE_VALUES, "cpu", tile)
    scheme = SCHEMES[name]
    parts, weight = make_parts(scheme, rows, 96)
    biases = torch.randn(sum(rows), generator=torch.Generator().manual_seed(2)).split(rows)
    parts = [{**part, "bias": bias} for part, bias in zip(parts, biases, strict=True)]
    module = make_module(scheme, parts, rows, 96, bias=True)
    assert torch.equal(module.dequantize(torch.float64), weight)
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(module(x).double(), F.linear(x.double(), weight, torch.cat(biases).double()), atol=1e-4)
    for before, after, shapes in zip(parts, module.parts(rows), module.part_shapes(rows), strict=True):
        assert before.keys() == after.keys() == shapes.keys()
        for suffix, tensor in before.items():
            assert tensor.dtype == after[suffix].dtype and tuple(tensor.shape) == shapes[suffix]
            assert torch.equal(tensor.double(), after[suffix].double())


@pytest.mark.parametrize("name", SCHEMES)
def test_tensors_say_what_is_written(name: str) -> None:
    scheme = SCHEMES[name]
    (part,), _ = make_parts(scheme, [10], 96)
    found = {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in part.items()}
    assert found == layout_of(scheme).tensors(scheme, 10, 96, torch.float32)


def test_codes_survive_a_change_of_dtype() -> None:
    scheme = SCHEMES["fp8 channel"]
    parts, weight = make_parts(scheme, [8], 96)
    module = make_module(scheme, parts, [8], 96).to(torch.bfloat16)
    assert module.codes.element_size() == 1 and torch.equal(
        module.parts([8])[0]["weight"].double(), parts[0]["weight"].double()
    )
    assert torch.allclose(module.dequantize(torch.float64), weight, rtol=0.01)
    with pytest.raises(ArtifactError, match=r"int8.*e4m3"):
        make_module(scheme, [{**parts[0], "weight": torch.zeros(8, 96, dtype=torch.int8)}], [8], 96)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_survives_its_own_json(name: str) -> None:
    config = Quantization(((("Linear",), SCHEMES[name]),), ("lm_head",))
    assert config_of.read(config_of.to_json(config)) == config
    assert linear_of(config_of.to_json(config), "model.layers.0.mlp.up_proj") == (
        "dequantizing",
        {"scheme": SCHEMES[name]},
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_decompresses_to_the_same_weights(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    scheme = SCHEMES[name]
    group = config_of.to_json(Quantization(((("Linear",), scheme),)))["config_groups"]["group_0"]
    theirs = quantization.QuantizationScheme.model_validate(group)
    (part,), weight = make_parts(scheme, [8], 96)
    wide = {suffix: one.double() if suffix == "weight_scale" else one for suffix, one in part.items()}
    back = BaseCompressor.get_value_from_registry(scheme.layout).decompress(wide, theirs)["weight"]
    assert torch.allclose(back.double(), weight, atol=1e-12)


def test_what_hone_cannot_run_is_refused_by_name() -> None:
    fp8 = SCHEMES["fp8 channel"]
    assert problem(fp8) is None
    assert "e2m1 weights of 4 bits, strategy group" in problem(Scheme(4, 16, "nvfp4-pack-quantized", number="e2m1"))
    wrong = config_of.to_json(Quantization(((("Linear",), fp8),)))
    wrong["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    with pytest.raises(ArtifactError, match=r"weights\.strategy = 'channel'"):
        config_of.read(wrong)
    wrong["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    with pytest.raises(ArtifactError, match="output_activations"):
        config_of.read(wrong)
    assert "asymmetric e4m3" in problem(Scheme(8, symmetric=False, **FP8))
    assert "strategy block" in problem(Scheme(4, block=(8, 8)))
    with pytest.raises(SpecError, match="cannot store e5m2"):
        config_of.to_json(Quantization(((("Linear",), Scheme(8, layout="float-quantized", number="e5m2")),)))
