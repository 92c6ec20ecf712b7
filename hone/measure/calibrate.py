"""Micro-benchmarks of one device: bandwidth, matrix product rates, the cost of starting an operation."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from hone.base.lazy import lazy
from hone.measure.calibration import (
    AttentionRate,
    Bandwidth,
    Calibration,
    Layout,
    MatmulRate,
    keep_calibration,
    read_calibration,
)
from hone.measure.machine import describe, identity

torch = lazy("torch")

BUDGET_S = 4.0
"""Most seconds of measuring; a slow machine gets fewer repetitions, not fewer points."""

_SHAPES = [
    (m, n, k)
    for m in (1, 4, 16, 64, 256, 2048)
    for n, k in ((256, 256), (1024, 256), (256, 1024), (1024, 1024), (4096, 256))
] + [(256, 256, 2048), (1024, 256, 2048), (256, 1024, 2048), (4096, 256, 2048)]
_GRADIENT_SHAPES = [
    (m, n, k) for m in (256, 2048) for n, k in ((256, 256), (1024, 256), (256, 1024), (1024, 1024), (4096, 256))
]
_GPU_SHAPES = [
    (m, n, k) for m in (1, 16, 256, 4096, 16384) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
]
_GPU_GRADIENT_SHAPES = [
    (m, n, k) for m in (2048, 16384) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
]
_ATTENTION = (4, 8, 256, 32)
_GPU_ATTENTION = (2, 32, 2048, 128)
_COLD_BYTES = 1 << 24
_COPY_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)


def calibrate(device: str = "cpu", dtype: str | None = None, *, fresh: bool = False) -> Calibration:
    """Rates of `device` for `dtype`, measured in under 5 s on two cores, then kept in the user's cache folder.

    `dtype` defaults to float32 on a CPU and bfloat16 on a GPU. Returns what is kept unless `fresh`; rates of other
    formats measured earlier stay.
    """
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    machine = describe(device)
    who = identity(machine)
    kept = read_calibration(who)
    if kept is not None and dtype in kept.dtypes and not fresh:
        return kept
    timer = _Timer(device)
    op_s = _op_seconds(timer)
    forward, gradients = (_GPU_SHAPES, _GPU_GRADIENT_SHAPES) if timer.cuda else (_SHAPES, _GRADIENT_SHAPES)
    layouts: list[tuple[Layout, list]] = [
        ("forward", forward),
        ("input_gradient", gradients),
        ("weight_gradient", gradients),
    ]
    share_s = BUDGET_S / 2 / (len(forward) + 2 * len(gradients))
    matmuls = tuple(
        _matmul_rate(timer, dtype, shape, layout, op_s, share_s) for layout, shapes in layouts for shape in shapes
    )
    attention = _attention_rate(timer, dtype)
    kept_matmuls = tuple(rate for rate in kept.matmuls if rate.dtype != dtype) if kept is not None else ()
    kept_attentions = tuple(rate for rate in kept.attentions if rate.dtype != dtype) if kept is not None else ()
    calibration = Calibration(
        device=machine.processor,
        threads=1 if timer.cuda else torch.get_num_threads(),
        torch=str(machine.torch),
        read_bytes_per_s=_read_rate(timer),
        copies=tuple(_copy_rate(timer, size, op_s) for size in _COPY_BYTES),
        matmuls=kept_matmuls + matmuls,
        attentions=(*kept_attentions, attention),
        op_s=op_s,
        exp_per_s=_softmax_rate(timer),
    )
    keep_calibration(who, calibration)
    describe.cache_clear()
    return calibration


class _Timer:
    """Seconds of a call on one device, the least of several tries (others may use the machine too)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda = device.startswith("cuda")

    def least(self, work: Callable[[], object], budget_s: float, inner: int = 1) -> float:
        """Least seconds of one `work()` among tries of `inner` calls that together take about `budget_s`."""
        work()
        self.wait()
        best, begun, tries = float("inf"), time.perf_counter(), 0
        while tries < 2 or time.perf_counter() - begun < budget_s:
            before = time.perf_counter()
            for _ in range(inner):
                work()
            self.wait()
            best = min(best, (time.perf_counter() - before) / inner)
            tries += 1
            if time.perf_counter() - begun > 4 * budget_s:
                break
        return best

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def _op_seconds(timer: _Timer) -> float:
    tensor = torch.ones(64, device=timer.device)
    return timer.least(lambda: tensor + 1.0, 0.1, inner=200)


def _matmul_rate(
    timer: _Timer, dtype: str, shape: tuple[int, int, int], layout: Layout, op_s: float, budget_s: float
) -> MatmulRate:
    """The product of a linear layer of `n` outputs and `k` inputs on `m` rows; a gradient's shape is that of its product."""
    rows, outputs, inputs = shape
    number = getattr(torch, dtype)
    # A model's own products find neither weights nor activations in the nearest cache: go round several of each.
    size = 4 * (rows * inputs + outputs * inputs + rows * outputs)
    copies = 1 if timer.cuda else max(1, min(4, _COLD_BYTES // size))
    # On a CPU the numbers do not matter, and drawing them would take longer than the products; a GPU that multiplies
    # ones takes less power and is a sixth faster than it ever is on real numbers.
    make = torch.randn if timer.cuda else torch.ones
    sets = [
        tuple(
            make(one, dtype=number, device=timer.device) for one in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for _ in range(copies)
    ]
    turn = itertools.cycle(sets)
    products: deque = deque(maxlen=copies)

    def work() -> None:
        x, weight, y = next(turn)
        products.append(x @ weight.T if layout == "forward" else y @ weight if layout == "input_gradient" else y.T @ x)

    m, n, k = {
        "forward": (rows, outputs, inputs),
        "input_gradient": (rows, inputs, outputs),
        "weight_gradient": (outputs, inputs, rows),
    }[layout]
    took = timer.least(work, budget_s, inner=copies)
    rate = 2.0 * m * n * k / max(took - op_s, took / 4)
    return MatmulRate(dtype=dtype, m=m, n=n, k=k, flops_per_s=rate, layout=layout)


def _attention_rate(timer: _Timer, dtype: str) -> AttentionRate:
    batch, heads, seq_len, head_dim = _GPU_ATTENTION if timer.cuda else _ATTENTION
    shape = (3, batch, seq_len, heads, head_dim)
    # As a decoder has them: heads beside each other in memory.
    qkv = torch.randn(shape, device=timer.device).to(getattr(torch, dtype)).transpose(2, 3)
    flops = 4.0 * batch * heads * head_dim * seq_len * (seq_len + 1) / 2

    def forward() -> object:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

    def train() -> object:
        q, k, v = (part.detach().requires_grad_() for part in qkv)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(mixed, (q, k, v), mixed.detach())

    with torch.no_grad():
        alone = flops / timer.least(forward, 0.1)
    return AttentionRate(dtype=dtype, forward_flops_per_s=alone, train_flops_per_s=flops / timer.least(train, 0.15))


def _copy_rate(timer: _Timer, num_bytes: int, op_s: float) -> Bandwidth:
    source = torch.ones(num_bytes // 8, device=timer.device)
    target = torch.empty_like(source)
    took = timer.least(lambda: target.copy_(source), 0.05)
    return Bandwidth(num_bytes=num_bytes, bytes_per_s=num_bytes / max(took - op_s, took / 4))


def _read_rate(timer: _Timer) -> float:
    source = torch.ones(1 << 26, device=timer.device)
    return source.numel() * 4 / timer.least(lambda: source.sum(), 0.1)


def _softmax_rate(timer: _Timer) -> float:
    logits = torch.randn(256, 4096, device=timer.device)
    return logits.numel() / timer.least(lambda: torch.log_softmax(logits, -1), 0.1)
