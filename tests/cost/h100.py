"""A machine like the one that the ledger's rows of two H100 were measured on, its calibration made of rates from the ledger.

Products, fp8 linears and the update's kernels have rows of their own from an H100. Attention's are from an H200, the same chip with
other memory. What an H100 sustains has no row: it is the one number here that is fitted, to one step on one GPU.
"""

from __future__ import annotations

import json
from typing import Any

from hone.measure import calibrate as micro
from hone.measure.calibration import (
    Bandwidth,
    Calibration,
    CollectiveTime,
    KernelRate,
    LinearRate,
    MatmulRate,
)
from hone.measure.machine import Gpu, Machine
from tests.cost.h200 import LEDGER, OP_S, attention

GPU = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85017493504, capability="9.0", num_multiprocessors=132)
SUSTAINED = {"bfloat16": 0.895, "float8": 0.99}
"""Of the rates of products on their own: fitted to 'training step on 1 GPU, 8 layers of Llama-3 8B' in bf16 and fp8."""

LAYER_FLOPS = 3 * 2 * 8192 * 218_103_808
"""Of the linears of a layer of Llama-3 8B over 8,192 tokens, forward and backward."""


def rows(figure: str) -> list[dict[str, Any]]:
    """The rows of benchmarks/ledger/train.jsonl whose figure has `figure` in it, measured on an H100."""
    lines = (LEDGER / "train.jsonl").read_text(encoding="utf8").splitlines()
    found = [one for one in map(json.loads, lines) if figure in one["figure"]]
    return [one for one in found if any("H100" in gpu["name"] for gpu in one["machine"]["gpus"])]


def h100(num_ranks: int = 1) -> Machine:
    """As `hone calibrate` would find it."""
    (linears,) = rows("a layer's linears of Llama-3 8B")
    peak = LAYER_FLOPS / (linears["peer_value"] / 1e3)
    (adamw,), (widen,) = rows("adamw_step, 268 M"), rows("widen, 268 M")
    copy = adamw["value"]

    def flops_per_s(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / max(2 * m * n * k / peak, 2 * (m * n + m * k + n * k) / copy)

    shapes = [("forward", shape) for shape in micro.GPU_SHAPES]
    shapes += [(how, one) for how in ("input_gradient", "weight_gradient") for one in micro.GPU_GRADIENT_SHAPES]
    products = [(layout, micro._product(layout, *shape)) for layout, shape in shapes]  # type: ignore[arg-type]
    calibration = Calibration(
        device=GPU.name, threads=1, torch="2.11.0", read_bytes_per_s=copy, op_s=OP_S, exp_per_s=copy / 8,
        copies=tuple(Bandwidth(num_bytes=size, bytes_per_s=copy) for size in micro._COPY_BYTES),
        matmuls=tuple(
            MatmulRate(dtype="bfloat16", m=m, n=n, k=k, flops_per_s=flops_per_s(m, n, k), layout=layout)
            for layout, (m, n, k) in products
        ),
        attentions=tuple(map(attention, (2048, 8192, 16384))),
        kernels=(
            *(KernelRate(kernel=name, dtype="bfloat16", bytes_per_s=copy) for name in ("rms_norm", "swiglu", "rope", "adamw")),
            KernelRate(kernel="widen", dtype="bfloat16", bytes_per_s=widen["value"]),
        ),
        fp8=tuple(
            LinearRate(
                recipe=recipe, held=held, passes=passes, m=8192, n=14336, k=4096,
                flops_per_s=LAYER_FLOPS / milliseconds * 1e3,
            )
            for recipe, held, milliseconds in _FP8
            for passes in ("forward", "trained")
        ),
        sustained=SUSTAINED, beside=0.56 if num_ranks > 1 else None,
        collectives=tuple(
            CollectiveTime(op=op, algorithm="backend", ranks=2, num_bytes=size << 20, seconds=microseconds / 1e6)
            for op, size, microseconds in _COLLECTIVES if num_ranks > 1
        ),
    )  # fmt: skip
    return Machine(
        cpu="cpu", num_cores=32, num_threads=32, ram_bytes=1 << 38, gpus=(GPU,) * max(num_ranks, 1), os="Linux", python="3.12",
        torch="2.11.0", device="cuda", calibration=calibration, num_ranks=num_ranks,
    )  # fmt: skip


_FP8 = (("rowwise", False, 11.349), ("rowwise", True, 10.217), ("tensorwise", False, 10.960))
"""Milliseconds of these linears, of the row "a layer's linears of Llama-3 8B" and its note."""

_COLLECTIVES = (
    ("all_reduce", 64, 340),
    ("reduce_scatter", 64, 249),
    ("all_gather", 64, 253),
    ("all_to_all", 64, 249),
    ("all_reduce", 256, 1024),
    ("reduce_scatter", 256, 678),
    ("all_gather", 256, 658),
    ("all_to_all", 256, 637),
)
"""(op, MiB, microseconds) on two H100 of one host, and above what products beside them lose: `hone calibrate` of 2026-11-26."""
