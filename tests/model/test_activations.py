"""Rounded inputs: against compressed-tensors' functions, by hand, and in a linear of every pair of formats."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import ArtifactError
from hone.compress.quantizers.base import Quantizer
from hone.model.quantized import config as config_of
from hone.model.quantized import layouts
from hone.model.quantized.rounded_inputs import RoundedInputs
from hone.model.quantized.scheme import Activations, Quantization, Scheme
from hone.ops.rounding import numbers
from hone.ops.rounding.inputs import (
    ACTIVATIONS,
    encode,
    power_scales,
    round_inputs,
    round_number,
    static_tensors,
    tensors_of,
)

INT8 = Scheme(8, 0, "int-quantized")
FP8 = Scheme(8, 0, "float-quantized", number="e4m3")
NVFP4 = Scheme(4, 16, "nvfp4-pack-quantized", number="e2m1", scales="e4m3")
MXFP4 = Scheme(4, 32, "mxfp4-pack-quantized", number="e2m1", scales="e8m0")
MXFP8 = Scheme(8, 32, "mxfp8-quantized", number="e4m3", scales="e8m0")
PAIRS = {
    **{f"int8 {name}": (INT8, name) for name in ("int8_token", "int8_token_asymmetric", "int8_tensor", "int8_tensor_asymmetric")},
    "int4 int8_token": (Scheme(4, 32), "int8_token"),
    **{f"int4 {name}": (Scheme(4), name) for name in ("int4_token", "int4_token_asymmetric")},
    "int4 fp8_token": (Scheme(4, 32), "fp8_token"),
    "int8 group int8_token": (Scheme(8, 32), "int8_token"),
    **{f"fp8 {name}": (FP8, name) for name in ("fp8_token", "fp8_tensor", "fp8_group")},
    "nvfp4 nvfp4": (NVFP4, "nvfp4"),
    "mxfp4 mxfp4": (MXFP4, "mxfp4"),
    "mxfp4 fp8_token": (MXFP4, "fp8_token"),
    "mxfp8 mxfp8": (MXFP8, "mxfp8"),
}  # fmt: skip


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values off zero, with outliers, and a token of zeros."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3
    x.view(-1, shape[-1])[1, ::7] *= 30
    x.view(-1, shape[-1])[2] = 0
    return x


def given(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The calibrated tensors for a range that clips some of x."""
    return static_tensors(ACTIVATIONS[name], float(x.min()) * 0.7, float(x.max()) * 0.8)


def value(x: torch.Tensor, name: str) -> torch.Tensor:
    """x rounded, with its scales."""
    found = round_inputs(x, ACTIVATIONS[name], given(name, x))
    return found.values if found.scales is None else (found.values * found.scales).to(x.dtype)


def quantization(name: str):
    """compressed-tensors' arguments for the rounding, from the config that hone writes."""
    theirs = pytest.importorskip("compressed_tensors.quantization")
    scheme = next(
        Scheme(**{**one.__dict__, "activations": ACTIVATIONS[name]}) for one, kind in PAIRS.values() if kind == name
    )
    group = config_of.to_json(Quantization(((("Linear",), scheme),)))["config_groups"]["group_0"]
    return theirs.QuantizationScheme.model_validate(group).input_activations


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_inputs_are_rounded_as_compressed_tensors_does(name: str) -> None:
    from_args = quantization(name)
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    x = inputs(2, 6, 256)
    x[0, 2] = 1e-3  # zeros in a token make its scale 0 / 0 there
    module = torch.nn.Module()
    module.quantization_status = QuantizationStatus.INITIALIZED
    for suffix, tensor in given(name, x).items():
        setattr(module, suffix, tensor)
    theirs = forward_quantize(module, x, "input", from_args)
    ours = value(x, name)
    largest = x.abs().amax(-1, keepdim=True)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * float(largest.max())), (ours - theirs).abs().max()
    assert (ours - x).abs().max() > 1e-3, "nothing was rounded"


def test_8_bit_integers_by_hand() -> None:
    x = inputs(4, 32)
    for row in range(4):
        values = x[row].tolist()
        largest = max(map(abs, values)) or 127.5
        scale = torch.tensor(largest) / 127.5
        codes, scales, points = encode(x, ACTIVATIONS["int8_token"], {})
        assert points is None and scales[row, 0] == scale
        for code, one in zip(codes[row].tolist(), values, strict=True):
            assert code == max(-128, min(127, round(float(torch.tensor(one) / scale))))
        codes, scales, points = encode(x, ACTIVATIONS["int8_token_asymmetric"], {})
        low, high = min(*values, 0.0), max(*values, 0.0)
        scale = (torch.tensor(high) - torch.tensor(low)) / 255 if high > low else torch.tensor(1.0)
        point = max(-128, min(127, round(float(-128 - torch.tensor(low) / scale))))
        assert scales[row, 0] == scale and points[row, 0] == point
        for code, one in zip(codes[row].tolist(), values, strict=True):
            assert code == max(-128, min(127, round(float(torch.tensor(one) / scale + point))))


def test_4_bit_floats_round_as_the_table_of_their_values() -> None:
    x = torch.cat((torch.linspace(-6, 6, 9601), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    table = numbers.decode(numbers.nearest(x, "e2m1"), "e2m1", x.dtype)
    assert torch.equal(round_number(x, "e2m1"), table)


def test_powers_of_two_are_those_of_the_largest_value() -> None:
    largest = torch.tensor([0.0, 1e-45, 2.0**-130, 1.0, 1.7499, 1.75, 6.0, 7.0, 1e38])
    exponents = power_scales(largest, "e2m1").view(torch.uint8).int() - 127
    assert exponents.tolist() == [-127, -127, -127, -2, -2, -1, 0, 1, 124]


def test_a_static_range_holds_zero_and_is_never_empty() -> None:
    for name, activation in ACTIVATIONS.items():
        for ends in ((0.0, 0.0), (1.0, 3.0), (-3.0, -1.0)):
            for suffix, tensor in static_tensors(activation, *ends).items():
                assert torch.isfinite(tensor.float()).all(), (name, ends, suffix)
    assert int(static_tensors(ACTIVATIONS["int8_tensor_asymmetric"], 1.0, 3.0)["input_zero_point"]) == -128
    assert float(static_tensors(ACTIVATIONS["int8_tensor"], -1.0, 3.0)["input_scale"]) == pytest.approx(3 / 127.5)
    assert float(static_tensors(ACTIVATIONS["nvfp4"], -1.0, 3.0)["input_global_scale"]) == pytest.approx(448 * 6 / 3)


def test_the_options_are_the_table() -> None:
    field = Quantizer.model_fields["activations"].annotation
    assert set(typing.get_args(field)) == {"none", *ACTIVATIONS}


def module_of(
    pair: str, rows: list[int], columns: int, *, bias: bool = True
) -> tuple[RoundedInputs, list, torch.Tensor]:
    """A loaded linear, its checkpoint parts and its dense weight."""
    plain, name = PAIRS[pair]
    scheme = Scheme(**{**plain.__dict__, "activations": ACTIVATIONS[name]})
    assert layouts.problem(scheme) is None
    weight = torch.randn(sum(rows), columns, generator=torch.Generator().manual_seed(3)) * 0.1
    if scheme.scales == "float":
        largest = weight.unflatten(1, (-1, scheme.group_size or columns)).abs().amax(-1)
        scales, divisor = (largest / (448 if scheme.number == "e4m3" else 2.0 ** (scheme.bits - 1))).half(), None
    else:
        from hone.ops.rounding import float_grid

        divisor = float_grid.global_scale_of(weight) if scheme.scales == "e4m3" else None
        scales = float_grid.find_scales(weight, scheme.number, scheme.group_size, "absmax", divisor=divisor)
    stored = scheme.quantize(weight, scales, None, divisor)
    stored = layouts.replace(stored, inputs=given(name, inputs(2, 5, columns)))
    begin, parts = 0, []
    for count in rows:
        parts.append(
            layouts.write(stored.rows(slice(begin, begin + count)))
            | ({"bias": torch.arange(count) / 9} if bias else {})
        )
        begin += count
    with torch.device("meta"):
        module = RoundedInputs(columns, sum(rows), bias, scheme=scheme)
    module.load(parts)
    return module, parts, stored.weight(torch.float32)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_linear_multiplies_rounded_inputs(pair: str) -> None:
    rows, x = [8, 16, 8], inputs(2, 5, 128)
    module, parts, weight = module_of(pair, rows, 128)
    bias = torch.cat([part["bias"] for part in parts])
    assert torch.equal(module.dequantize(torch.float32), weight)
    expected = F.linear(value(x, PAIRS[pair][1]).double(), weight.double(), bias.double())
    assert torch.allclose(module(x).double(), expected, rtol=1e-5, atol=2e-4)
    assert (F.linear(x, weight, bias) - expected).abs().max() > 1e-2, "inputs were not rounded"
    assert torch.allclose(module(x[0]), module(x)[0], rtol=1e-5, atol=1e-4)
    module.bias = None
    half, wide = module(x.bfloat16()).double(), module(x.bfloat16().float()).double()
    assert half.shape == wide.shape and (half - wide).norm() < 0.02 * wide.norm()


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_give_back_what_load_took(pair: str) -> None:
    rows = [8, 16, 8]
    module, parts, _ = module_of(pair, rows, 128)
    for before, after, shapes in zip(parts, module.parts(rows), module.part_shapes(rows), strict=True):
        assert before.keys() == after.keys() == shapes.keys()
        for suffix, tensor in before.items():
            assert tensor.dtype == after[suffix].dtype and tuple(tensor.shape) == shapes[suffix], suffix
            assert torch.equal(tensor.view(torch.uint8), after[suffix].view(torch.uint8)), suffix
    entries = layouts.tensors_of(module.scheme, 8, 128, torch.float16)
    assert {suffix: (one.dtype, tuple(one.shape)) for suffix, one in parts[0].items() if suffix != "bias"} == entries


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_survives_its_own_json(pair: str) -> None:
    plain, name = PAIRS[pair]
    config = Quantization(
        ((("Linear",), Scheme(**{**plain.__dict__, "activations": ACTIVATIONS[name]})),), ("lm_head",)
    )
    values = config_of.to_json(config)
    assert config_of.read(values) == config
    assert config_of.linear_of(values, "model.layers.0.mlp.up_proj") == (
        "rounded_inputs",
        {"scheme": config.groups[0][1]},
    )


@pytest.fixture
def exact_int_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a GPU's integer product: oneDNN's saturates on CPUs whose VNNI it may not use (ONEDNN_MAX_CPU_ISA)."""
    monkeypatch.setattr(torch, "_int_mm", lambda one, other: (one.long() @ other.long()).to(torch.int32))


@pytest.mark.parametrize("name", ["int8_token", "int8_token_asymmetric", "int8_tensor", "int8_tensor_asymmetric"])
def test_integer_products_are_the_products_of_rounded_values(name: str, exact_int_mm: None) -> None:
    module, _, _ = module_of(f"int8 {name}", [8, 16, 8], 128)
    x = inputs(2, 5, 128)
    tensors = {suffix: getattr(module, suffix) for suffix in module.given}
    assert torch.allclose(module._integer_product(x, tensors), module(x), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["int8_token", "int8_token_asymmetric", "int8_tensor", "int8_tensor_asymmetric"])
def test_a_gpu_multiplies_integers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes in both: a CPU's division may round an input between two codes to the other one."""
    module, _, _ = module_of(f"int8 {name}", [8, 16, 8], 128)
    x = inputs(4, 16, 128).cuda()
    assert module.cuda()._integers(x) and not module._integers(x[0, :2])
    found = module(x)
    monkeypatch.setattr(module, "_integers", lambda _: False)
    assert torch.allclose(found, module(x), rtol=1e-5, atol=1e-4)


def test_integer_products_are_exact_also_where_floats_are_not(exact_int_mm: None) -> None:
    module, _, _ = module_of("int8 int8_tensor_asymmetric", [16], 8192, bias=False)
    module.codes = module.codes.abs().clamp(min=100)
    tensors = {suffix: getattr(module, suffix) for suffix in module.given}
    x = inputs(3, 8192).abs() + 20
    codes, scales, points = encode(x, module.rounding, given("int8_tensor_asymmetric", inputs(2, 5, 8192)))
    sums = (codes.long() - points.long()) @ module.codes.long().T
    assert int(sums.abs().max()) > 1 << 24, "float32 would hold every sum"
    expected = sums.double() * scales.double() * module.scales.view(-1).double()
    assert torch.allclose(module._integer_product(x, tensors).double(), expected, rtol=1e-6)


def test_projections_of_one_input_must_agree_on_its_scale() -> None:
    module, parts, _ = module_of("int8 int8_tensor", [8, 8], 128)
    parts[1]["input_scale"] = parts[1]["input_scale"] * 2
    with pytest.raises(ArtifactError, match="different input_scale"):
        module.load(parts)


def test_what_no_product_multiplies_is_refused() -> None:
    assert "e4m3 weights with int inputs" in layouts.problem(Scheme(**{**FP8.__dict__, "activations": Activations()}))
    block = config_of.to_json(Quantization(((("Linear",), Scheme(**{**INT8.__dict__, "activations": Activations()})),)))
    found = block["config_groups"]["group_0"]["input_activations"]
    for key, wrong in (
        ("strategy", "channel"),
        ("dynamic", False),
        ("num_bits", 6),
        ("type", "bool"),
        ("scale_dtype", "torch.uint8"),
    ):
        block["config_groups"]["group_0"]["input_activations"] = {**found, key: wrong}
        with pytest.raises(ArtifactError, match=rf"input_activations\.{key}"):
            config_of.read(block)
    assert tensors_of(None) == {} and tensors_of(ACTIVATIONS["int8_token"]) == {}
