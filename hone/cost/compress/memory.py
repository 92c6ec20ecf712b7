"""Bytes that a compression adds to a rank's memory at its peak, from shapes alone."""

from __future__ import annotations

from hone.base.figure import Estimate, human_bytes
from hone.base.ranks import CHUNK
from hone.cost.activations.segments import saved_values
from hone.cost.compress.compression import Compression, MatrixWork
from hone.cost.memory import BYTES, FORWARD_GAPS, forward_bytes
from hone.measure.machine import Machine

CODE_BYTES = 28 << 20
"""Bytes that the engine's modules, safetensors and LAPACK bring into memory while a CPU compresses (torch 2.13)."""


def compress_bytes(machine: Machine, work: Compression) -> Estimate:
    """Growth of memory at its peak: states, a layer as computed and as stored, its Hessians, and
    one batch or one solve."""
    parts = _peak(machine, work, variants=1)
    for model, passes in work.measured:
        parts = max(parts, _peak(machine, model, passes.variants), key=lambda one: sum(one.values()))
    formula = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)
    return Estimate(value=float(sum(parts.values())), unit="B", formula=formula)


def _peak(machine: Machine, work: Compression, variants: int) -> dict[str, float]:
    """Bytes that are in memory at once on a rank, with `variants` of the hidden states."""
    gpu, width = machine.device.startswith("cuda"), BYTES[work.dtype]
    every = (*work.layers, *work.head)
    largest = [*work.dims.layer_params, *(one.size for head in work.head for one in head)]
    layer = max(largest, default=0) * (width + work.stored_width)
    solved = (*every, *work.embedding)
    solve = max((_solve_bytes(one, work) for matrices in solved for one in matrices), default=0.0)
    hessians = 0
    if work.tokens:
        hessians = max((sum(4 * one.columns**2 for one in matrices) for matrices in every), default=0)
        hessians *= 1 + work.paired
    widest = max((one.columns for matrices in every for one in matrices), default=0)
    share, checked = work.share(machine.num_ranks), work.share(machine.num_ranks, work.check_sequences)
    saved = sum(saved_values(one, work.dims.hidden_size) for one in work.dims.layers)
    together = min(work.batch_size, max(work.num_sequences, work.check_sequences))
    batch = forward_bytes(work.dims, tokens=together * work.seq_len, dtype=work.dtype)
    return {
        "hidden states": share * variants * work.states_bytes
        + checked * 2 * work.check_sequences * work.seq_len * work.dims.hidden_size * width,
        "one layer": layer,
        "the whole model": width * work.dims.num_params if work.probes or work.differentiated else 0,
        "its backward pass": width * work.seq_len * saved if work.differentiated else 0,
        "sums of x x^T": hessians,
        "between ranks": 4 * machine.num_ranks * min(widest**2, CHUNK) if machine.num_ranks > 1 and work.tokens else 0,
        # A CPU's heap keeps the gaps of a batch: allocations of a solve do not fit them, nor those of the next batch its own.
        "one batch, one solve": max(solve, batch) if gpu else solve + batch,
        "gaps in the heap": 0 if gpu or not work.tokens else FORWARD_GAPS * (solve + batch),
        "code": 0 if gpu else CODE_BYTES,
    }


def _solve_bytes(one: MatrixWork, work: Compression) -> float:
    held = max(step.temporaries for step in one.steps) * one.size
    return 4.0 * (held + (4 * one.columns**2 if work.tokens else 0))
