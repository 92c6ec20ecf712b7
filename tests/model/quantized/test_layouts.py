"""Storage layouts of other libraries against decoders written from their definitions, a value at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized import config as config_of
from hone.model.quantized.config import linear_of
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.layouts import LAYOUTS, layout_of
from hone.model.quantized.nf4 import NF4
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Quantization, Scheme, Stored
from hone.ops import formats

GENERATOR = torch.Generator()
NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]
"""AWQ: the feature in each nibble."""


def bits_of(words: list[int], bits: int, count: int) -> list[int]:
    """`count` unsigned values of a stream of 32-bit words, least significant bit first."""
    stream = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
    return [stream >> (bits * place) & ((1 << bits) - 1) for place in range(count)]


def gptq_weight(part: dict[str, Tensor], bits: int, subtracted: int) -> Tensor:
    """W [N, K] float64: scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o])."""
    columns, rows = len(part["g_idx"]), part["scales"].shape[1]
    zeros = torch.tensor([bits_of(group, bits, rows) for group in part["qzeros"].tolist()]) + subtracted
    values = torch.tensor([bits_of(words, bits, columns) for words in part["qweight"].T.tolist()])
    group = part["g_idx"].long()
    return (values - zeros[group].T) * part["scales"].double()[group].T


def awq_weight(part: dict[str, Tensor], columns: int) -> Tensor:
    """W [N, K] float64 of AWQ's GEMM layout."""

    def unpacked(words: Tensor) -> Tensor:
        found = torch.empty(len(words), words.shape[1] * 8)
        for place, feature in enumerate(NIBBLES):
            found[:, feature::8] = ((words.long() >> (4 * place)) & 15).float()
        return found

    width = columns // len(part["scales"])
    zeros, scales = unpacked(part["qzeros"]), part["scales"].double()
    return ((unpacked(part["qweight"]) - zeros.repeat_interleave(width, 0)) * scales.repeat_interleave(width, 0)).T


def made(scheme: Scheme, rows: int, columns: int, lowest: int = 0) -> Stored:
    """Random codes, scales and zero points (from `lowest` above the smallest)."""
    low, high = formats.code_range(scheme.bits)
    GENERATOR.manual_seed(0)
    codes = torch.randint(low, high + 1, (rows, columns), generator=GENERATOR).to(torch.int8)
    grid = scheme.grid(rows, columns)
    scales = (torch.rand(grid, generator=GENERATOR) - 0.5).half()
    points = torch.randint(low + lowest, high + 1, grid, generator=GENERATOR).to(torch.int8)
    return Stored(scheme, codes, scales, None if scheme.symmetric else points)


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape, name
        assert bool((tensor.double() == second[name].double()).all()), name


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_is_read_and_written(layout: str, bits: int, group_size: int, symmetric: bool) -> None:
    scheme = Scheme(bits, group_size, layout, symmetric=symmetric)
    stored = made(scheme, 32, 96, lowest=1 if layout == "gptq" else 0)
    part = LAYOUTS[layout].write(stored)
    entries = LAYOUTS[layout].tensors(scheme, 32, 96, torch.float32)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in part.items()} == entries
    assert torch.equal(gptq_weight(part, bits, layout == "gptq"), stored.weight(torch.float64))
    again = LAYOUTS[layout].read(scheme, part, 96)
    assert torch.equal(again.weight(torch.float64), stored.weight(torch.float64))
    assert_equal(part, LAYOUTS[layout].write(again))


def test_symmetric_zero_points_as_vllm_and_gptqmodel_expect() -> None:
    words = {
        layout: LAYOUTS[layout].write(made(Scheme(4, 32, layout), 32, 64))["qzeros"].long() & 0xFFFFFFFF
        for layout in ("gptq", "gptq_v2", "awq")
    }
    assert {name: {hex(word) for word in found.flatten().tolist()} for name, found in words.items()} == {
        "gptq": {"0x77777777"},
        "gptq_v2": {"0x88888888"},
        "awq": {"0x88888888"},
    }


def test_gptq_version_1_has_no_zero_point_zero() -> None:
    scheme = Scheme(4, 32, "gptq", symmetric=False)
    stored = made(scheme, 32, 64)
    with pytest.raises(SpecError, match="gptq_v2"):
        LAYOUTS["gptq"].write(Stored(scheme, stored.codes, stored.scales, torch.full_like(stored.zero_points, -8)))
    part = LAYOUTS["gptq"].write(Stored(scheme, stored.codes, stored.scales, torch.zeros_like(stored.zero_points)))
    part["qzeros"] = torch.full_like(part["qzeros"], -1)
    with pytest.raises(ArtifactError, match="stored as 15 by gptq version 1"):
        LAYOUTS["gptq"].read(scheme, part, 64)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_with_columns_in_another_order(symmetric: bool) -> None:
    """desc_act: a column's group is in g_idx; the linear stays packed and writes the same tensors."""
    scheme = Scheme(4, 32, "gptq", symmetric=symmetric, permuted=True)
    plain = made(scheme, 64, 96, lowest=1)
    GENERATOR.manual_seed(1)
    order = torch.randperm(96, generator=GENERATOR)
    index = (torch.arange(96) // 32)[order].to(torch.int32)
    stored = Stored(scheme, plain.codes, plain.scales, plain.zero_points, index)
    part = LAYOUTS["gptq"].write(stored)
    by_hand = gptq_weight(part, 4, 1)
    assert torch.equal(stored.weight(torch.float64), by_hand)
    module = Dequantizing(96, 128, False, scheme=scheme)
    module.load([part, part])
    x = torch.randn(3, 96, dtype=torch.float64, generator=GENERATOR)
    assert torch.allclose(module(x), x @ torch.cat([by_hand, by_hand]).T, atol=1e-12)
    for one in module.parts([64, 64]):
        assert_equal(one, part)
    with pytest.raises(ArtifactError, match="differently"):
        module.load([part, {**part, "g_idx": index.flip(0)}])
    with pytest.raises(ArtifactError, match="desc_act false"):
        LAYOUTS["gptq"].read(Scheme(4, 32, "gptq", symmetric=symmetric), part, 96)
    with pytest.raises(ArtifactError, match="no scales"):
        LAYOUTS["gptq"].read(scheme, {**part, "g_idx": index + 1}, 96)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 0])
def test_awq_is_read_and_written(group_size: int, symmetric: bool) -> None:
    scheme = Scheme(4, group_size, "awq", symmetric=symmetric)
    stored = made(scheme, 32, 96)
    part = LAYOUTS["awq"].write(stored)
    entries = LAYOUTS["awq"].tensors(scheme, 32, 96, torch.float32)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in part.items()} == entries
    assert torch.equal(awq_weight(part, 96), stored.weight(torch.float64))
    assert_equal(part, LAYOUTS["awq"].write(LAYOUTS["awq"].read(scheme, part, 96)))


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_other_zero_points_than_the_config_says_are_refused(layout: str) -> None:
    part = LAYOUTS[layout].write(made(Scheme(4, 32, layout, symmetric=False), 32, 64, lowest=1))
    with pytest.raises(ArtifactError, match="other zero points"):
        LAYOUTS[layout].read(Scheme(4, 32, layout), part, 64)


def test_a_block_of_fp8_shares_a_float32_scale() -> None:
    scheme = Scheme(8, layout="fp8", number="e4m3", block=(128, 128))
    weights = torch.randn(256, 192, generator=GENERATOR.manual_seed(0))
    scales = torch.rand(2, 2, generator=GENERATOR) + 0.1
    part = LAYOUTS["fp8"].write(scheme.quantize(weights, scales))
    assert part["weight_scale_inv"].dtype == torch.float32 and part["weight"].dtype == torch.float8_e4m3fn
    by_hand = part["weight"].float()
    for row in range(2):
        for column in range(2):
            by_hand[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= scales[row, column]
    module = Dequantizing(192, 256, False, scheme=scheme)
    module.load([part])
    assert torch.equal(module.dequantize(torch.float32), by_hand)
    assert torch.equal(module.dequantize(torch.bfloat16), by_hand.bfloat16())
    assert_equal(module.parts([256])[0], part)


BLOCKS = {
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.mark.parametrize(
    ("method", "changes", "kind", "scheme"),
    [
        ("gptq", {}, "packed_int", Scheme(4, 32, "gptq")),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "packed_int", Scheme(4, 32, "gptq_v2")),
        ("gptq", {"sym": False}, "dequantizing", Scheme(4, 32, "gptq", symmetric=False)),
        ("gptq", {"desc_act": True}, "dequantizing", Scheme(4, 32, "gptq", permuted=True)),
        ("gptq", {"group_size": -1, "desc_act": True}, "packed_int", Scheme(4, 0, "gptq")),
        ("awq", {}, "dequantizing", Scheme(4, 32, "awq", symmetric=False)),
        ("awq", {"symmetric": True}, "packed_int", Scheme(4, 32, "awq")),
        ("fp8", {}, "dequantizing", Scheme(8, layout="fp8", number="e4m3", block=(128, 128))),
        ("bitsandbytes", {}, "nf4", Scheme(4, 64, "nf4-nested", number="nf4")),
        ("bitsandbytes", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}, "nf4",
         Scheme(4, 64, "fp4", number="fp4")),
        ("bitsandbytes", {"load_in_4bit": False, "load_in_8bit": True}, "packed_int", Scheme(8, layout="llm-int8")),
    ],
)  # fmt: skip
def test_a_config_says_the_scheme(method: str, changes: dict, kind: str, scheme: Scheme) -> None:
    values = {"quant_method": method, **BLOCKS[method], **changes}
    assert linear_of(values, "model.layers.0.mlp.up_proj") == (kind, {"scheme": scheme})
    assert linear_of(values, "lm_head") is None


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("gptq", {"bits": 5}, "bits = 5"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype = 'int16'"),
        ("gptq", {"group_size": 0}, "group_size = 0"),
        ("gptq", {"dynamic": {"+:(": {}}}, "dynamic"),
        ("awq", {"bits": 8}, "bits = 8"),
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ("fp8", {"weight_block_size": None}, "weight_block_size = None"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        ("bitsandbytes", {"load_in_4bit": False}, "load_in_4bit"),
        ("bitsandbytes", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type = 'af4'"),
        ("bitsandbytes", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ],
)
def test_a_config_that_hone_does_not_run_is_refused_by_its_key(method: str, changes: dict, named: str) -> None:
    with pytest.raises(ArtifactError, match=named) as caught:
        linear_of({"quant_method": method, **BLOCKS[method], **changes}, "model.layers.0.mlp.up_proj")
    assert "fix:" in str(caught.value)


def test_gptq_names_modules_that_differ_or_are_dense() -> None:
    values = {"quant_method": "gptq", **BLOCKS["gptq"]}
    values["dynamic"] = {r"-:.*\.layers\.0\.mlp": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64}}
    assert linear_of(values, "model.layers.0.mlp.up_proj") is None
    assert linear_of(values, "model.layers.1.mlp.up_proj")[1]["scheme"] == Scheme(4, 32, "gptq")
    assert linear_of(values, "model.layers.1.mlp.down_proj")[1]["scheme"] == Scheme(8, 64, "gptq")
    assert linear_of({**values, "lm_head": True}, "lm_head")[1]["scheme"] == Scheme(4, 32, "gptq")
    inside = {**values, "dynamic": None, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"]]}
    assert linear_of(inside, "model.layers.0.self_attn.q_proj") is not None
    assert linear_of(inside, "model.layers.0.mlp.up_proj") is None
    down, rest = "model.layers.1.mlp.down_proj", Scheme(4, 32, "gptq")
    written = config_of.to_json(
        Quantization((((down,), Scheme(4, 64, "gptq")), (("Linear",), rest)), ("lm_head", "model.norm"), "gptq")
    )
    assert linear_of(written, down)[1]["scheme"] == Scheme(4, 64, "gptq")
    assert linear_of(written, "model.layers.11mlp.down_proj")[1]["scheme"] == rest
    assert linear_of(written, "model.norm") is None and linear_of(written, "lm_head") is None


@pytest.mark.parametrize("method", ["awq", "fp8", "bitsandbytes"])
def test_skipped_modules_are_matched_as_transformers_matches_them(method: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    key = "llm_int8_skip_modules" if method == "bitsandbytes" else "modules_to_not_convert"
    names = ["lm_head"] + [f"model.layers.{index}.mlp.{name}" for index in (1, 11) for name in ("up_proj", "down_proj")]
    for skipped in (["model.layers.1"], ["down_proj"], ["lm_head", "layers.1.mlp.up_proj"], ["model.layers.*.mlp.up"]):
        values = {"quant_method": method, **BLOCKS[method], key: [*skipped, "lm_head"]}
        for name in names:
            assert (linear_of(values, name) is not None) == should_convert_module(name, [*skipped, "lm_head"]), name


@pytest.mark.parametrize("method", ["awq", "fp8", "bitsandbytes"])
def test_one_scheme_for_all_modules(method: str) -> None:
    groups = ((("a",), Scheme(4, 32, "awq")), (("Linear",), Scheme(4, 64, "awq")))
    with pytest.raises(SpecError, match="group sizes 32, 64"):
        config_of.to_json(Quantization(groups, (), method))


# bitsandbytes itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", ["nf4", "fp4"])
def test_a_weight_that_bitsandbytes_made_is_read_and_written_back(
    number: str, nested: bool, dtype: torch.dtype
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weights = torch.randn(96, 192, generator=GENERATOR.manual_seed(0)).to(dtype)
    packed, state = functional.quantize_4bit(weights, quant_type=number, compress_statistics=nested)
    part = {"weight": packed} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    scheme = Scheme(4, 64, f"{number}-nested" if nested else number, number=number)
    stored = layout_of(scheme).read(scheme, part, 192)
    theirs = functional.dequantize_4bit(packed, state)
    assert torch.equal(stored.weight(dtype), theirs)
    for kind in (Dequantizing, NF4):
        module = kind(192, 192, False, scheme=scheme)
        module.load([part, part])
        assert torch.equal(module.dequantize(dtype), torch.cat([theirs, theirs]))
        for one in module.parts([96, 96]):
            assert_equal(one, part)


def test_llm_int8_of_bitsandbytes_is_read_and_written() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weights = torch.randn(96, 192, generator=GENERATOR.manual_seed(0)).half()
    codes, largest, _ = functional.int8_vectorwise_quant(weights)
    part = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    module = PackedInt(192, 192, False, scheme=Scheme(8, layout="llm-int8"))
    module.load([part, part])
    theirs = functional.int8_vectorwise_dequant(codes, largest)
    assert (module.dequantize(torch.float32)[:96] - theirs).abs().max() <= 1e-6
    for one in module.parts([96, 96]):
        assert_equal(one, part)
    with pytest.raises(ArtifactError, match="weight_format 1"):
        module.load([{**part, "weight_format": torch.tensor(1, dtype=torch.uint8)}] * 2)
