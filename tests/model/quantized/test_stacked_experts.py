"""Codes of all experts in one tensor, as GPUs multiply them: the same weights and checkpoint tensors as one expert after another."""

from __future__ import annotations

import copy

import pytest
import torch

from hone.model.linear import LINEARS, ExpertLinears
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.scheme import Scheme
from hone.ops import expert_swiglu, permute, swiglu, unpermute
from hone.ops.activation.reference import swiglu as gate
from hone.ops.dispatch import Choice
from hone.ops.moe.weights import ExpertWeights, pack_pairs, unpack_pairs
from hone.ops.rounding.inputs import ACTIVATIONS

EXPERTS = 3
SCHEMES = {
    "int4 groups of 32": Scheme(4, 32),
    "int4 groups of 96": Scheme(4, 96),
    "int4 rows": Scheme(4),
    "int8 groups": Scheme(8, 64),
    "int8 rows": Scheme(8),
    "fp8 blocks": Scheme(8, layout="fp8", number="e4m3", block=(128, 128)),
    "fp8 rows": Scheme(8, layout="float-quantized", number="e4m3"),
    "mxfp4": Scheme(4, 32, layout="mxfp4-pack-quantized", number="e2m1", scales="e8m0"),
}
ROUNDED = {
    "W8A8": Scheme(8, layout="int-quantized", activations=ACTIVATIONS["int8_token"]),
    "W4A8": Scheme(4, 64, activations=ACTIVATIONS["int8_token"]),
    "W8A8 fp8": Scheme(8, layout="float-quantized", number="e4m3", activations=ACTIVATIONS["fp8_token"]),
}
SCHEMES |= ROUNDED


def experts_of(scheme: Scheme, rows: int, columns: int) -> tuple[ExpertLinears, list[dict[str, torch.Tensor]]]:
    """Experts of random weights with two checkpoint modules each, and what they were loaded from."""
    torch.manual_seed(rows)
    kind = "packed_int" if scheme.number == "int" else "dequantizing"
    kind = "rounded_inputs" if scheme.activations is not None else kind
    parts = []
    for _ in range(2 * EXPERTS):
        scales = torch.rand(scheme.grid(rows // 2, columns)) / (100 if scheme.bits == 8 else 6) + 0.001
        scales = scales.to(torch.float8_e8m0fnu) if scheme.scales == "e8m0" else scales
        parts.append(layout_of(scheme).write(scheme.quantize(torch.randn(rows // 2, columns), scales)))
    linears = ExpertLinears(LINEARS[kind](columns, rows, False, scheme=scheme) for _ in range(EXPERTS))
    linears.load(parts)
    return linears, parts


@pytest.mark.parametrize("name", SCHEMES)
def test_stacking_changes_nothing_but_where_codes_are(name: str) -> None:
    columns = 192 if "96" in name else 256
    linears, parts = experts_of(SCHEMES[name], 512, columns)
    apart, index = linears.dequantize(torch.float32), torch.tensor([3, 500])
    rows = linears[1].rows(index, torch.float32)
    assert linears[0].stacks
    linears.stack()
    stacked = linears.stacked
    assert stacked is not None and stacked.sizes == (EXPERTS, 512, columns)
    torch.testing.assert_close(stacked.dequantize(torch.float32), apart, rtol=1e-6, atol=0)
    assert torch.equal(linears.dequantize(torch.float32), apart)
    assert torch.equal(linears[1].rows(index, torch.float32), rows)
    for one in linears:
        assert one.codes.untyped_storage().data_ptr() == stacked.values.untyped_storage().data_ptr()
        assert one.scales.untyped_storage().data_ptr() == stacked.scales.untyped_storage().data_ptr()  # type: ignore[union-attr]
    for written, read in zip(linears.parts([256] * 2 * EXPERTS), parts, strict=True):
        assert all(torch.equal(written[suffix].float(), tensor.float()) for suffix, tensor in read.items())


@pytest.mark.parametrize("name", ["int4 groups of 32", "int8 rows", "fp8 blocks", "mxfp4"])
def test_a_layer_of_stacked_experts_is_one_expert_after_another(name: str) -> None:
    gate_up, down = experts_of(SCHEMES[name], 512, 256)[0], experts_of(SCHEMES[name], 256, 256)[0]
    x, ids, weights = torch.randn(7, 256) / 16, torch.randint(0, EXPERTS, (7, 2)), torch.rand(7, 2)
    rows, ends, place = permute(x, ids, EXPERTS)
    wanted = unpermute(down(gate(gate_up(rows, ends)), ends), place, weights)
    for one in (gate_up, down):
        one.stack()
    found = expert_swiglu(x, ids, weights, gate_up.stacked, down.stacked)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    again = unpermute(down(swiglu(gate_up(rows, ends)), ends), place, weights)  # experts still work by themselves
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROUNDED)
def test_stacked_experts_round_their_inputs(name: str) -> None:
    """But for a few codes of the inner values, which another order of a sum moves by one."""
    gate_up, down = experts_of(SCHEMES[name], 512, 256)[0], experts_of(SCHEMES[name], 256, 256)[0]
    x, ids, weights = torch.randn(7, 256) / 16, torch.randint(0, EXPERTS, (7, 2)), torch.rand(7, 2)
    rows, ends, place = permute(x, ids, EXPERTS)
    wanted = unpermute(down(gate(gate_up(rows, ends)), ends), place, weights)
    for one in (gate_up, down):
        one.stack()
    assert gate_up.rounding == down.rounding == ("fp8" if "fp8" in name else "int8")
    found = expert_swiglu(x, ids, weights, gate_up.stacked, down.stacked, rounding=gate_up.rounding)  # type: ignore[arg-type]
    assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max()
    plain = expert_swiglu(x, ids, weights, gate_up.stacked, down.stacked)  # type: ignore[arg-type]
    assert (plain - wanted).norm() > 1e-3 * wanted.norm()


@pytest.mark.parametrize("name", ["int8_tensor", "int8_token_asymmetric", "int4_token", "fp8_group"])
def test_inputs_that_no_kernel_rounds_keep_experts_apart(name: str) -> None:
    number, layout = ("e4m3", "float-quantized") if name.startswith("fp8") else ("int", "int-quantized")
    scheme = Scheme(8, layout=layout, number=number, activations=ACTIVATIONS[name])  # type: ignore[arg-type]
    assert not LINEARS["rounded_inputs"](256, 256, False, scheme=scheme).stacks


@pytest.mark.parametrize("name", ["int8 rows", "fp8 rows", "mxfp4"])
def test_biases_are_stacked(name: str) -> None:
    scheme = SCHEMES[name]
    parts = experts_of(scheme, 128, 32)[1]
    down = ExpertLinears(
        LINEARS["packed_int" if scheme.number == "int" else "dequantizing"](32, 64, True, scheme=scheme) for _ in parts
    )
    down.load([{**part, "bias": torch.randn(64)} for part in parts])
    x, ids, weights = torch.randn(5, 64), torch.randint(0, len(parts), (5, 1)), torch.ones(5, 1)
    wanted = torch.stack([down[int(one)](row) for one, row in zip(ids, gate(x))])
    down.stack()
    gate_up = ExpertWeights(torch.eye(64)[None].repeat(len(parts), 1, 1))  # the halves of x
    torch.testing.assert_close(expert_swiglu(x, ids, weights, gate_up, down.at_once()), wanted, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_a_move_leaves_no_stale_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    linears, _ = experts_of(SCHEMES["int4 rows"], 256, 256)
    before = linears.dequantize(torch.float32)
    linears.stack()
    linears.to(torch.bfloat16)
    assert linears.stacked is None, "a CPU has no kernel of all experts"
    torch.testing.assert_close(linears.dequantize(torch.float32), before, rtol=1e-2, atol=0)
    monkeypatch.setattr("hone.ops.dispatch.choose", lambda *_, **__: Choice("triton", ""))
    linears.to(torch.float32)
    assert isinstance(linears.stacked, ExpertWeights)


def test_what_touches_one_expert_ends_the_stack() -> None:
    """Else a layer that is computed at once would not see it: what calibration watches, and weights that are loaded anew."""
    linears, parts = experts_of(SCHEMES["int8 rows"], 256, 256)
    linears.stack()
    assert linears.at_once() is linears.stacked is not None
    assert copy.deepcopy(linears).at_once() is not None
    hook = linears[1].register_forward_pre_hook(lambda *_: None)
    assert linears.at_once() is None
    hook.remove()
    assert linears.at_once() is not None
    linears[2].load(parts[:2])
    assert linears.at_once() is None
    linears.stack()
    assert torch.equal(linears.at_once().values[0], linears.at_once().values[2])  # type: ignore[union-attr]


def test_experts_that_differ_are_not_stacked() -> None:
    scheme = SCHEMES["int4 rows"]
    linears, _ = experts_of(scheme, 256, 256)
    assert not linears.stacks_on(torch.device("cpu"))
    biased = LINEARS["packed_int"](256, 256, True, scheme=scheme)
    assert linears[0].stacks and biased.stacks
    assert not LINEARS["packed_int"](256, 256, False, scheme=Scheme(4, 16)).stacks  # narrower than a kernel's block
    assert not LINEARS["packed_int"](256, 256, False, scheme=Scheme(3)).stacks


def test_pairs() -> None:
    codes = torch.randint(-8, 8, (2, 5, 96), dtype=torch.int8)
    for block in (32, 96):
        assert torch.equal(unpack_pairs(pack_pairs(codes, block), block), codes)
    assert pack_pairs(torch.tensor([-8, 7, 0, 1], dtype=torch.int8), 4).tolist() == [0 | 8 << 4, 15 | 9 << 4]
