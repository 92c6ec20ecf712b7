"""A machine like the one that the ledger's GPU rows were measured on, its calibration made of rates from those rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.cost.dims import ModelDims
from hone.measure import calibrate as micro
from hone.measure.calibration import AttentionRate, Bandwidth, Calibration, MatmulRate
from hone.measure.machine import Gpu, Machine

LEDGER = Path(__file__).resolve().parents[2] / "benchmarks" / "ledger"
GPU = Gpu(name="NVIDIA H200", memory_bytes=150109880320, capability="9.0", num_multiprocessors=132)
OP_S = 5e-6
"""Start of an operation in torch on a GPU. No row of the ledger: 4 to 6 us are usual, and nothing below hangs on it."""

LLAMA_8B = ModelDims.uniform(
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, max_seq_len=8192,
)  # fmt: skip


def row(area: str, figure: str, day: str = "") -> dict[str, Any]:
    """The newest row of benchmarks/ledger/AREA.jsonl named `figure` that was measured on an H200, on `day` where it is given."""
    lines = (LEDGER / f"{area}.jsonl").read_text(encoding="utf8").splitlines()
    rows = [found for found in map(json.loads, lines) if found["figure"] == figure and found["time"].startswith(day)]
    rows = [found for found in rows if any("H200" in gpu["name"] for gpu in found["machine"]["gpus"])]
    assert rows, f"{area}.jsonl has no row {figure!r} from an H200"
    return max(rows, key=lambda found: found["time"])


def h200() -> Machine:
    """As `hone calibrate` would find it: cuBLAS's and hone's rates where the ledger has them, else its roofline."""
    day = row("ops", "attend fwd d128 causal s8192")["time"][:10]  # other cards and days have other ceilings
    read, copy, peak = (
        1e12 * row("ops", f"ceiling {what}", day)["value"] for what in ("read", "copy", "bf16 GEMM 8192")
    )
    matmuls = [_matmul("forward", shape, peak, read) for shape in micro.GPU_SHAPES]
    for layout in ("input_gradient", "weight_gradient"):
        matmuls += [_matmul(layout, shape, peak, read) for shape in micro.GPU_GRADIENT_SHAPES]
    calibration = Calibration(
        device=GPU.name, threads=1, torch="2.11.0", read_bytes_per_s=read, op_s=OP_S, exp_per_s=read / 8,
        copies=tuple(Bandwidth(num_bytes=size, bytes_per_s=copy) for size in micro._COPY_BYTES),
        matmuls=tuple(matmuls),
        attentions=tuple(map(attention, (2048, 8192, 16384))),
    )  # fmt: skip
    return Machine(
        cpu="cpu", num_cores=16, num_threads=16, ram_bytes=1 << 37, gpus=(GPU,), os="Linux", python="3.12",
        torch="2.11.0", device="cuda", calibration=calibration,
    )  # fmt: skip


def attention(seq_len: int) -> AttentionRate:
    """Of hone's kernels; the backward pass has 2.5 times the FLOPs."""
    forward, backward = (1e12 * row("ops", f"attend {way} d128 causal s{seq_len}")["value"] for way in ("fwd", "bwd"))
    return AttentionRate(
        dtype="bfloat16",
        seq_len=seq_len,
        forward_flops_per_s=forward,
        train_flops_per_s=1 / (1 / forward + 2.5 / backward),
    )


def _matmul(layout: str, shape: tuple[int, int, int], peak: float, read: float) -> MatmulRate:
    m, n, k = micro._product(layout, *shape)
    seconds = max(2 * m * n * k / peak, 2 * (m * n + m * k + n * k) / read)
    rows, outputs, inputs = shape
    if layout == "forward" and rows in (1, 16) and {outputs, inputs} == {14336, 4096}:
        seconds = (
            2 * outputs * inputs / (1e12 * row("ops", f"linear bf16 M {rows}, {outputs} x {inputs}")["peer_value"])
        )
    return MatmulRate(dtype="bfloat16", m=m, n=n, k=k, flops_per_s=2 * m * n * k / seconds, layout=layout)
