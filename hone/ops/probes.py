"""The work that a calibration times of the kernels of a training: attention, one pass over memory each, fp8 linears.

Shapes are those of a layer of Llama-3 8B over 8,192 tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hone.measure.timer import Probe
from hone.measure.training import FP8, KERNEL, gpu_attention
from hone.ops.activation.api import swiglu
from hone.ops.attention.api import attend
from hone.ops.fp8.api import fp8_trained_linear
from hone.ops.fp8.factors import weight_codes
from hone.ops.fp8.recipes import RECIPES
from hone.ops.norm.api import rms_norm
from hone.ops.rope.api import rope
from hone.ops.update.api import adamw_step, widen
from hone.ops.update.reference import AdamWNumbers

_TOKENS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 8192, 4096, 14336, 32, 8, 128
_NORM_TOKENS, _GATE_TOKENS = 8 * _TOKENS, 2 * _TOKENS
"""So many that the kernels, not the host that starts them, take the time."""

_WEIGHTS = 1 << 26
_LINEARS = [(rows, *shape) for rows in (2048, 16384) for shape in ((4096, 4096), (14336, 4096), (4096, 14336))]
"""(rows, output features, input features)."""


def training_probes(device: str, dtype: str) -> dict[Hashable, Probe]:
    """The probes of the kernels that a training in `dtype` runs on a GPU, by the names of `hone.measure.training`."""
    found = quick_probes(device, dtype)
    if dtype == "bfloat16" and torch.cuda.get_device_capability(device) >= (8, 9):
        found |= _fp8_linears(device)
    return found


def quick_probes(device: str, dtype: str) -> dict[Hashable, Probe]:
    """Those of `training_probes` that are timed in seconds: without the fp8 linears, whose tiles are searched for each shape first."""
    number = getattr(torch, dtype)
    # The op itself, wherever it has a kernel; attention of float32 too.
    found = gpu_attention(device, dtype, lambda q, k, v: attend(q, k, v), num_kv_heads=_KV_HEADS)
    return found | _passes(device, number) | _updates(device, number)


def _passes(device: str, number: torch.dtype) -> dict[Hashable, Probe]:
    """Forward and backward passes of norm with residual sum, gate, and rotation."""
    width = number.itemsize

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(number)

    x, rest, weight = random(_NORM_TOKENS, _HIDDEN), random(_NORM_TOKENS, _HIDDEN), random(_HIDDEN)
    gates, heads = random(_GATE_TOKENS, 2 * _INNER), random(_NORM_TOKENS, _HEADS, _HEAD_DIM)
    flow = random(_GATE_TOKENS, _INNER)
    angles = torch.rand(_NORM_TOKENS, 1, _HEAD_DIM // 2, device=device)

    def norm() -> object:
        leaves = [one.detach().requires_grad_() for one in (x, rest, weight)]
        return torch.autograd.grad(rms_norm(leaves[0], leaves[2], 1e-5, leaves[1]), leaves, (rest, x))

    def gate() -> object:
        leaf = gates.detach().requires_grad_()
        return torch.autograd.grad(swiglu(leaf), leaf, flow)

    def turn() -> object:
        leaf = heads.detach().requires_grad_()
        return torch.autograd.grad(rope(leaf, angles, angles), leaf, heads)

    # Values read and written: x, residual, sum and y forward, three read and one written backward; two halves and the product,
    # these and the gradient of both; one read and one written each way.
    moved = {
        "rms_norm": (norm, _NORM_TOKENS * 8 * _HIDDEN),
        "swiglu": (gate, _GATE_TOKENS * 8 * _INNER),
        "rope": (turn, _NORM_TOKENS * 4 * _HEADS * _HEAD_DIM),
    }
    return {(KERNEL, name): Probe(work, width * values, 0.1, wants_grad=True) for name, (work, values) in moved.items()}


def _updates(device: str, number: torch.dtype) -> dict[Hashable, Probe]:
    """AdamW's step in one pass, with the new weights rounded, and gradients widened."""
    wide = [torch.rand(_WEIGHTS, device=device) for _ in range(4)]
    weight, grad, mean, square = wide
    rounded, factor = torch.zeros(_WEIGHTS, dtype=number, device=device), torch.ones((), device=device)
    numbers = AdamWNumbers(10, 1e-9, 0.9, 0.95, 1e-8, 0.0)
    half = number != torch.float32

    def step() -> None:
        adamw_step(weight, grad, mean, square, numbers, factor=factor, rounded=rounded if half else None)

    return {
        (KERNEL, "adamw"): Probe(step, _WEIGHTS * (28 + number.itemsize * half), 0.1),
        (KERNEL, "widen"): Probe(lambda: widen(grad, rounded), _WEIGHTS * (4 + number.itemsize), 0.1),
    }


def _fp8_linears(device: str) -> dict[Hashable, Probe]:
    """Linears in every recipe, their weights' codes computed by each pass and held; forward alone and with the backward pass."""
    found: dict[Hashable, Probe] = {}
    for rows, outputs, inputs in _LINEARS:
        x, weight, flow = (
            torch.randn(shape, device=device).bfloat16()
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for recipe in RECIPES:
            for held in (False, True):
                codes = weight_codes(weight, recipe) if held else None

                def forward(x: Any = x, weight: Any = weight, recipe: str = recipe, codes: Any = codes) -> Tensor:
                    return fp8_trained_linear(x, weight, recipe=recipe, held=codes)

                def train(x: Any = x, weight: Any = weight, flow: Any = flow, run: Any = forward) -> object:
                    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
                    return torch.autograd.grad(run(*leaves), leaves, flow)

                flops, name = 2.0 * rows * outputs * inputs, (rows, outputs, inputs)
                found[FP8, recipe, held, "forward", *name] = Probe(forward, flops, 0.03)
                found[FP8, recipe, held, "trained", *name] = Probe(train, 3 * flops, 0.05, wants_grad=True)
    return found
