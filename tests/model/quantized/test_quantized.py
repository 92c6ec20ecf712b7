"""PackedInt against a dense layer of the same weights; its memory; the config it is read from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hone.base.errors import ArtifactError
from hone.model.quantized import config as config_of
from hone.model.quantized import packed_int
from hone.model.quantized.config import linear_of
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Quantization, Scheme, Stored
from hone.ops import formats

SCHEMES = [
    Scheme(2, 16),
    Scheme(3, 32),
    Scheme(4, 32),
    Scheme(4, 0),
    Scheme(5, 32),
    Scheme(8, 0, "int-quantized"),
    Scheme(8, 0),
    Scheme(8, 32),
    Scheme(8, block=(4, 32), layout="int-quantized"),
]


def make_parts(scheme: Scheme, rows: list[int], columns: int, bias: bool = False, dtype=torch.float32):
    """Checkpoint modules with random codes and scales of both signs, and the dense weight and bias they stand for."""
    generator = torch.Generator().manual_seed(0)
    low, high = formats.code_range(scheme.bits)
    parts, weights, biases = [], [], []
    for count in rows:
        codes = torch.randint(low, high + 1, (count, columns), generator=generator, dtype=torch.int8)
        scales = (torch.randn(scheme.grid(count, columns), generator=generator) * 0.1).to(dtype)
        part = layout_of(scheme).write(Stored(scheme, codes, scales))
        if bias:
            part["bias"] = torch.randn(count, generator=generator)
            biases.append(part["bias"])
        parts.append(part)
        weights.append(formats.dequantize(codes, scheme.by_row(scales, count, columns), torch.float64))
    return parts, torch.cat(weights), torch.cat(biases).double() if bias else None


def make_module(scheme: Scheme, parts: list, rows: list[int], columns: int, bias: bool = False) -> PackedInt:
    with torch.device("meta"):
        module = PackedInt(columns, sum(rows), bias, scheme=scheme)
    module.load(parts)
    return module


def compiled(module: PackedInt, x: torch.Tensor) -> bool:
    """Whether the product of codes runs in the compiled kernel of this CPU."""
    return x.dtype != torch.float32 and module.on_cpu(x.dtype, x.numel() // x.shape[-1]).backend == "compiled"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [[8, 4, 4], [7]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [1 << 20, 100])
def test_forward_equals_the_dense_layer(scheme: Scheme, rows: list[int], bias: bool, tile: int, monkeypatch) -> None:
    monkeypatch.setitem(packed_int.TILE_VALUES, "cpu", tile)
    parts, weight, offset = make_parts(scheme, rows, 96, bias)
    module = make_module(scheme, parts, rows, 96, bias)
    for shape in ((96,), (3, 96), (2, 5, 96)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        expected = F.linear(x.double(), weight, offset)
        assert torch.allclose(module(x).double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(module.dequantize(torch.float64), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_weights_round_as_a_dense_bfloat16_layer(scheme: Scheme) -> None:
    parts, _, _ = make_parts(scheme, [8, 4], 64, dtype=torch.bfloat16)
    module = make_module(scheme, parts, [8, 4], 64)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = F.linear(x, module.dequantize(torch.bfloat16))
    if compiled(module, x):  # weights are not rounded: the output is, once
        exact = F.linear(x.double(), module.dequantize(torch.float64))
        assert torch.allclose(module(x).double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))
    elif module.scales.shape[1] > 1:
        assert torch.equal(module(x), expected)
    else:  # scaled behind the product, which rounds the outputs and not the weights
        assert torch.allclose(module(x), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [[8, 4, 4], [7]])
def test_parts_gives_back_what_load_took(scheme: Scheme, rows: list[int]) -> None:
    parts, _, _ = make_parts(scheme, rows, 96, bias=True)
    module = make_module(scheme, parts, rows, 96, bias=True)
    for before, after, shapes in zip(parts, module.parts(rows), module.part_shapes(rows), strict=True):
        assert before.keys() == after.keys() == shapes.keys()
        for suffix, tensor in before.items():
            assert torch.equal(tensor, after[suffix]) and tuple(tensor.shape) == shapes[suffix]


class Largest(TorchDispatchMode):
    """Bytes of the largest floating tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(3, 32), Scheme(8, 0, "int-quantized")])
def test_memory_is_the_packed_size_and_a_tile(scheme: Scheme, monkeypatch) -> None:
    rows, columns, tile = [256, 128, 128], 512, 1 << 14
    monkeypatch.setitem(packed_int.TILE_VALUES, "cpu", tile)
    monkeypatch.setattr(packed_int, "UNPACKED_VALUES", tile)
    parts, _, _ = make_parts(scheme, rows, columns, dtype=torch.bfloat16)
    with Largest() as largest:
        module = make_module(scheme, parts, rows, columns)
        module(torch.randn(1, columns))
    held = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    scale_bytes = 512 * scheme.num_groups(columns) * 2
    assert held == 512 * columns * scheme.bits // 8 + scale_bytes
    assert largest.bytes <= 4 * tile, "more than one tile was unpacked"


def test_the_config_survives_its_own_json() -> None:
    config = Quantization(
        ((("re:.*mlp.*",), Scheme(8, 0, "int-quantized")), (("Linear",), Scheme(3, 32))), ("lm_head", "re:.*layers.0.*")
    )
    assert config_of.read(config_of.to_json(config)) == config
    assert config_of.to_json(config)["format"] == "mixed-precision"
    assert config.scheme("lm_head") is None and config.scheme("model.layers.0.mlp.up_proj") is None
    assert config.scheme("model.layers.1.mlp.up_proj") == Scheme(8, 0, "int-quantized")
    assert config.scheme("model.layers.1.self_attn.q_proj") == Scheme(3, 32)
    assert linear_of(config_of.to_json(config), "lm_head") is None
    assert linear_of(config_of.to_json(config), "model.layers.1.self_attn.q_proj") == (
        "packed_int",
        {"scheme": Scheme(3, 32)},
    )


@pytest.mark.parametrize(("columns", "kind"), [(96, "packed_int"), (80, "dequantizing"), (0, "dequantizing")])
def test_int8_blocks_stay_packed_where_they_divide_the_columns(columns: int, kind: str) -> None:
    scheme = Scheme(8, block=(32, 32), layout="int-quantized")
    values = config_of.to_json(Quantization(((("Linear",), scheme),)))
    assert linear_of(values, "model.layers.0.mlp.up_proj", columns) == (kind, {"scheme": scheme})


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (("quant_method",), "gptq", "gptq"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        (("config_groups", "group_0", "weights", "symmetric"), None, "symmetric"),
        (("config_groups", "group_0", "weights", "type"), "float", "type"),
        (("config_groups", "group_0", "weights", "num_bits"), 16, "num_bits"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "actorder"),
        (("config_groups", "group_0", "weights", "strategy"), "block", "strategy"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "input_activations"),
        (("config_groups", "group_0", "format"), "float-quantized", "float-quantized"),
        (("config_groups",), {}, "config_groups"),
    ],
)
def test_a_config_hone_cannot_compute_is_refused_by_name(path: tuple[str, ...], value: object, names: str) -> None:
    values = config_of.to_json(Quantization(((("Linear",), Scheme(4, 32)),)))
    here = values
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    with pytest.raises(ArtifactError, match=names):
        config_of.read(values)
