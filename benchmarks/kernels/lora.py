"""Checks and rates of the kernels behind LoRA and QLoRA: parts of `benchmarks.finetune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import ceilings, median_seconds
from hone.ops import dequantize_nf4, lora_linear
from hone.ops.activation.api import swiglu_gradient
from hone.ops.nf4.reference import Nested, dynamic_map

Row = dict[str, Any]
RANK = 16


def checks(args: argparse.Namespace) -> Iterator[Row]:
    """Kernels on this device against references, bit for bit or in float64."""
    device = args.device
    generator = torch.Generator(device).manual_seed(0)
    kernel = "triton" if device.startswith("cuda") else None
    for number in ("nf4", "fp4"):
        codes = torch.randint(0, 256, (300, 512), dtype=torch.uint8, device=device, generator=generator)
        plain = torch.rand(300, 16, device=device, generator=generator)
        eighths = torch.randint(0, 256, (300, 16), dtype=torch.uint8, device=device, generator=generator)
        outer, offsets = torch.rand(2, 20, device=device, generator=generator)
        for scales, nested in ((plain, None), (eighths, Nested(dynamic_map().to(device), outer, offsets, 100))):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                ways = [
                    dequantize_nf4(codes, scales, dtype, number=number, nested=nested, backend=backend)
                    for backend in (kernel, "reference")
                ]
                wrong = int((ways[0] != ways[1]).sum())
                name = f"{number}, {'both levels' if nested else 'float32 scales'}, {dtype}: weights that differ"
                yield {"figure": name, "value": wrong, "unit": "of 307200", "passed": wrong == 0}
    yield from _lora_check(device, generator)


def _lora_check(device: str, generator: torch.Generator) -> Iterator[Row]:
    """Gradients of a stacked LoRA linear behind a SwiGLU in bf16: error against float64, beside that of the formula in bf16."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    x, weight, rows = drawn(400, 1024), drawn(768, 512) / 20, (384, 192, 192)
    factors = [*(drawn(RANK, 512) / 20 for _ in rows), *(drawn(count, RANK) / 4 for count in rows)]
    flow, begins = drawn(400, 768), (0, 384, 576)

    def run(way: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in (x, *factors)]
        out = way(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, flow.to(dtype))]

    def ours(x: Tensor, *both: Tensor) -> Tensor:
        return lora_linear(x, weight.to, None, both[:3], both[3:], scale=2.0, begins=begins, gated=True)

    def formula(x: Tensor, *both: Tensor) -> Tensor:
        inputs = F.silu(x[:, :512]) * x[:, 512:]
        added = [inputs @ down.T @ up.T * 2.0 for down, up in zip(both[:3], both[3:], strict=True)]
        return inputs @ weight.to(x.dtype).T + torch.cat(added, 1)

    exact, found, eager = run(formula, torch.float64), run(ours, torch.bfloat16), run(formula, torch.bfloat16)
    for name, true, mine, plain in zip(("output", "x", *"ABCDEF"), exact, found, eager, strict=True):
        error, other = (float((one.double() - true).norm() / true.norm()) for one in (mine, plain))
        name = {"A": "A of q", "B": "A of k", "C": "A of v", "D": "B of q", "E": "B of k", "F": "B of v"}.get(
            name, name
        )
        yield {
            "figure": f"lora_linear in bf16, error of {name}", "value": error, "unit": "of float64",
            "peer": "autograd in bf16", "peer_value": other, "passed": error <= 2 * other + 1e-5,
        }  # fmt: skip
    gate_up, upstream = drawn(300, 2048), drawn(300, 1024)
    wide = gate_up.double().requires_grad_()
    (true,) = torch.autograd.grad(F.silu(wide[:, :1024]) * wide[:, 1024:], wide, upstream.double())
    error = float((swiglu_gradient(gate_up, upstream).double() - true).norm() / true.norm())
    yield {"figure": "swiglu_gradient in bf16, error", "value": error, "unit": "of float64", "passed": error < 0.01}


def rates(args: argparse.Namespace) -> Iterator[Row]:
    """Bytes a second of the dequantizing kernel beside a copy, and seconds of a LoRA linear beside its frozen product."""
    device = args.device
    if not device.startswith("cuda"):
        yield {"figure": "rates of kernels", "value": None, "unit": "", "note": "need a GPU"}
        return
    top = ceilings()
    yield {"figure": "copy", "value": top.copy / 1e12, "unit": "TB/s"}
    yield {"figure": "bf16 product 8192^3", "value": top.gemm / 1e12, "unit": "TFLOP/s"}
    for rows, columns in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        count = max(1, 400_000_000 // (rows * columns))  # more than the cache holds
        sets = [torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device) for _ in range(count)]
        scales = torch.randint(0, 256, (rows, columns // 64), dtype=torch.uint8, device=device)
        outer, offsets = torch.rand(2, rows * columns // 16384, device=device)
        nested = Nested(dynamic_map().to(device), outer, offsets)
        seconds = median_seconds(
            lambda sets=sets, scales=scales, nested=nested: [
                dequantize_nf4(one, scales, torch.bfloat16, nested=nested) for one in sets
            ],
            calls=count,
        )
        moved = rows * columns * (2 + 0.5 + 1 / 64 + 8 / 16384) / seconds
        yield {
            "figure": f"nf4 to bf16, {rows} x {columns}", "value": moved / 1e12, "unit": "TB/s",
            "of_limit": moved / top.copy, "seconds": seconds, "passed": moved >= 0.8 * top.copy,
        }  # fmt: skip
    for name, columns, rows in (
        ("qkv", 4096, (4096, 1024, 1024)),
        ("gate_up", 4096, (14336, 14336)),
        ("down", 14336, (4096,)),
    ):
        yield from _linear_rate(device, args.rows * args.seq_len, name, columns, rows, top.gemm)


def _linear_rate(
    device: str, tokens: int, name: str, columns: int, rows: tuple[int, ...], gemm: float
) -> Iterator[Row]:
    """Forward and backward of one LoRA linear: the share of the time that its two frozen products need alone."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    x, weight, flow = drawn(tokens, columns).requires_grad_(), drawn(sum(rows), columns), drawn(tokens, sum(rows))
    downs = [drawn(RANK, columns).requires_grad_() for _ in rows]
    ups = [drawn(count, RANK).requires_grad_() for count in rows]
    begins = [sum(rows[:index]) for index in range(len(rows))]

    def both() -> None:
        out = lora_linear(x, lambda dtype: weight, None, downs, ups, scale=2.0, begins=begins)
        torch.autograd.grad(out, [x, *downs, *ups], flow)

    seconds = median_seconds(both, captured=False)
    with torch.no_grad():
        alone = median_seconds(lambda: (F.linear(x, weight), flow @ weight), captured=False)
    yield {
        "figure": f"LoRA {name}, forward and backward", "value": 1e3 * seconds, "unit": "ms", "peer": "frozen products alone",
        "peer_value": 1e3 * alone, "ratio": seconds / alone, "of_limit": 4 * tokens * columns * sum(rows) / gemm / seconds,
    }  # fmt: skip
