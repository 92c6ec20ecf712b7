"""LoRA of many adapters at once on a CPU, against each row's product with its merged factors in float64; the kernels' code for Hopper."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hone.ops import lora_expand, lora_shrink, slotted_linear

WIDTHS = (6, 2, 2)


def test_each_row_is_multiplied_by_the_factors_of_its_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    downs = torch.randn(2, 3 * 4, 7, generator=generator, dtype=torch.float64)
    ups = torch.randn(2, 10, 4, generator=generator, dtype=torch.float64)
    base = torch.randn(5, 10, generator=generator, dtype=torch.float64)
    slots, ranks = torch.tensor([1, -1, 0, 1, -1]), torch.tensor([[4, 0, 2], [1, 3, 4]])
    factors = torch.randn(2, 10, 2, generator=generator, dtype=torch.float64)
    found = lora_expand(lora_shrink(x, downs, slots, ranks), ups, slots, ranks, base.clone(), WIDTHS, factors=factors)
    for row, slot in enumerate(slots.tolist()):
        expected = base[row]
        if slot >= 0:
            merged = torch.zeros(10, 7, dtype=torch.float64)
            begin = 0
            for piece, width in enumerate(WIDTHS):
                rank = int(ranks[slot, piece])
                merged[begin : begin + width] = (
                    ups[slot, begin : begin + width, :rank] @ downs[slot, 4 * piece : 4 * piece + rank]
                )
                begin += width
            expected = base[row] * factors[slot, :, 0] + factors[slot, :, 1] + merged @ x[row]
        torch.testing.assert_close(found[row], expected)


def test_a_linear_with_slots_is_the_linear_and_its_factors() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 7, generator=generator, dtype=torch.float64) for size in (4, 10))
    downs = torch.randn(2, 3 * 4, 7, generator=generator, dtype=torch.float64)
    ups = torch.randn(2, 10, 4, generator=generator, dtype=torch.float64)
    slots, ranks = torch.tensor([1, -1, 0, 1]), torch.full((2, 3), 4)
    found = slotted_linear(x, weight, weight[:, 0], downs, ups, slots, ranks, WIDTHS)
    torch.testing.assert_close(found[1], weight @ x[1] + weight[:, 0])
    merged = torch.cat([up @ down for up, down in zip(ups[1].split(WIDTHS), downs[1].split(4), strict=True)])
    torch.testing.assert_close(found[0], (weight + merged) @ x[0] + weight[:, 0])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_for_hopper_use_tensor_cores_and_those_of_prompts_do_not_spill() -> None:
    from hone.ops.lora import triton_slots, triton_slots_few
    from tests.ops.compiled import SHARED_LIMIT, bf16, compile_triton, fp32

    sizes = {"PIECES": 3, "RANK": 16, "BLOCK_R": 16, "EARLY": True}
    strides = ("stride_x", "stride_slot", "stride_y", "stride_part")
    numbers = dict.fromkeys(("T", "K", *strides, "stride_ranks", "stride_factors"), "i32")
    types = {**bf16("x", "downs", "ups", "y"), **fp32("out", "narrow", "factors"), **numbers}
    types |= dict.fromkeys(("slots", "ranks", "table"), "*i32")
    scaled = {"SCALED": True}
    for kernel, more, warps in (  # the tiles that the launches choose for 4,096 input features
        (triton_slots.shrink, {"BLOCK_T": 64, "BLOCK_K": 128}, 4),
        (triton_slots.expand, {"BLOCK_T": 64, "BLOCK_N": 64, **scaled}, 8),
        (triton_slots_few.shrink_few, {"BLOCK_T": 32, "BLOCK_K": 512, "PARTS": 8}, 4),
        (triton_slots_few.expand_few, {"BLOCK_T": 32, "BLOCK_N": 256, "PARTS": 8, **scaled}, 4),
    ):
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        divisible = [name for name in strides if name in own]
        made = compile_triton(kernel, own, {**sizes, **more}, divisible=divisible, num_warps=warps)
        assert made.clean or "few" in kernel.__name__, (kernel, made)  # a tile of few rows spills some bytes
        assert not made.serialized and made.shared <= SHARED_LIMIT and (made.count("HMMA") or made.count("HGMMA")), (
            kernel,
            made,
        )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_product_with_factors_does_not_spill_on_hopper() -> None:
    from hone.ops.lora import triton_slotted
    from tests.ops.compiled import bf16, compile_triton, fp32

    strides = ("stride_x", "stride_weight", "stride_out", "stride_part", "stride_slot", "stride_piece", "stride_narrow")
    narrow = {"BLOCK_T": 32, "BLOCK_R": 16, "BLOCK_K": 256, "WIDTH": 512, "PARTS": 8}
    product = {"BLOCK_M": 32, "BLOCK_K": 128, "BLOCK_C": 64, "WHOLE_K": True, "HAS_BIAS": False, "MORE_STAGES": 4}
    for kernel, sizes, warps, out in (
        (triton_slotted.narrow_rows, narrow, 4, "*bf16"),
        (
            triton_slotted.slotted,
            {**product, "BLOCK_N": 64, "PARTS": 1, "SOON": False, "STAGES": 4},
            4,
            "*bf16",
        ),
        (
            triton_slotted.slotted,
            {**product, "BLOCK_N": 64, "PARTS": 2, "SOON": True, "STAGES": 5},
            4,
            "*fp32",
        ),
        (  # ranks that are no power of two
            triton_slotted.slotted,
            {**product, "BLOCK_N": 64, "PARTS": 1, "SOON": False, "STAGES": 4, "RANK": 48},
            4,
            "*bf16",
        ),
    ):
        sizes = {"RANK": 16, "ROOM": 32, "EARLY": True, **sizes}
        types = dict.fromkeys((name for name in kernel.arg_names if name not in sizes), "i32")
        known = {**bf16("x", "weight", "bias", "downs", "ups", "narrow"), **fp32("sums"), "out": out}
        types |= {name: kind for name, kind in known.items() if name in types}
        types |= {name: "*i32" for name in ("groups", "ranks") if name in types}
        divisible = [name for name in (*strides, "K", "N") if name in types]
        made = compile_triton(kernel, types, sizes, divisible=divisible, num_warps=warps)
        assert made.clean and (made.count("HMMA") or made.count("HGMMA")), (kernel, made)
