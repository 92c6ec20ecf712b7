"""Bytes that a compression adds to a rank's memory at its peak, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hone.base.figure import Estimate, human_bytes
from hone.base.ranks import CHUNK
from hone.cost.activations.segments import saved_values
from hone.cost.compress.compression import Compression, MatrixWork, Passes, hessian_block
from hone.cost.memory import BYTES, FORWARD_GAPS, forward_bytes
from hone.cost.work import Work, share_out
from hone.measure.machine import Machine

CODE_BYTES = 28 << 20
"""Bytes that the engine's modules, safetensors and LAPACK bring into memory while a CPU compresses (torch 2.13)."""

WORKSPACE_BYTES = 32 << 20
"""Bytes that a GPU's library of products keeps (cuBLAS on Hopper)."""

CHECKED = 1.75
"""Float32 tensors [K, K] that exist while a statistic is looked through for values that are not finite: its absolute values, three masks."""

ERROR_TENSORS = 5
"""Float32 tensors [N, K] that exist while a matrix's errors are measured: the weight, the given one, their difference, and two products."""

LAST = 9
"""Bytes a weight of the matrix before, which is let go only when the next one is solved: given, as float32; as it became; codes."""


def compress_bytes(machine: Machine, work: Compression, rank: int | None = None) -> Estimate:
    """Growth of memory at its peak: states, a layer as computed and as stored, its Hessians, and one batch or one solve.

    Of several ranks that of `rank`, None: of the one that needs most, by the matrices that it solves.
    """
    ranks = range(machine.num_ranks) if rank is None else (rank,)
    models = [(work, Passes(0.0, whole=bool(work.probes or work.differentiated))), *work.measured]
    every = (_peak(machine, model, passes, one) for model, passes in models for one in ranks)
    parts = max(every, key=lambda one: sum(one.values()))
    formula = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)
    return Estimate(value=float(sum(parts.values())), unit="B", formula=formula)


def _peak(machine: Machine, work: Compression, passes: Passes, rank: int) -> dict[str, float]:
    """Bytes that are in memory at once on `rank`, with what `passes` hold."""
    gpu, width = machine.device.startswith("cuda"), BYTES[work.dtype]
    largest = [*work.dims.layer_params, *(one.size for head in work.head for one in head)]
    share, checked = work.share(machine.num_ranks), work.checked_share(machine.num_ranks, rank)
    saved = sum(saved_values(one, work.dims.hidden_size) for one in work.dims.layers)
    states = share * passes.variants * work.states_bytes
    states += checked * 2 * work.check_sequences * work.seq_len * work.dims.hidden_size * width
    fixed = {
        "hidden states": states,
        "one layer": max(largest, default=0) * (width if gpu else width + work.stored_width),
        "the whole model": width * work.dims.num_params if passes.whole else 0,
        "its backward pass": width * work.seq_len * saved if work.differentiated else 0,
    }
    if gpu:
        moments = [one for index in range(len(_layers(work))) for one in _moments(machine, work, index, rank)]
        return fixed | max(moments, key=lambda one: sum(one.values()), default={}) | {"library": WORKSPACE_BYTES}
    return fixed | _on_cpu(machine, work)


def _layers(work: Compression) -> tuple[tuple[MatrixWork, ...], ...]:
    """The matrices of every layer, of the head and of the embedding."""
    return (*work.layers, *work.head, *work.embedding)


def _hessians(work: Compression, matrices: Sequence[MatrixWork]) -> float:
    """Bytes of the sums of x x^T of all of a layer's inputs."""
    return (1 + work.paired) * sum(4.0 * one.columns**2 for one in matrices) if work.tokens else 0.0


def _batch(work: Compression) -> float:
    """Bytes of one batch on its way through a layer."""
    together = min(work.batch_size, max(work.num_sequences, work.check_sequences))
    return forward_bytes(work.dims, tokens=together * work.seq_len, dtype=work.dtype)


def _on_cpu(machine: Machine, work: Compression) -> dict[str, float]:
    """Bytes of a CPU beside what is there throughout: its heap keeps the gaps of all that came before."""
    solved = [one for matrices in _layers(work) for one in matrices]
    inside = (*work.layers, *work.head)
    widest = max((one.columns for matrices in inside for one in matrices), default=0)
    solve = max((_solve_bytes(one, work, machine.device) for one in solved), default=0.0)
    batch = _batch(work)
    return {
        "sums of x x^T": max((_hessians(work, matrices) for matrices in inside), default=0),
        "between ranks": 4 * machine.num_ranks * min(widest**2, CHUNK) if machine.num_ranks > 1 and work.tokens else 0,
        # Allocations of a solve do not fit the gaps of a batch, nor those of the next batch its own.
        "one batch, one solve": solve + batch,
        "gaps in the heap": FORWARD_GAPS * (solve + batch) if work.tokens else 0,
        "code": CODE_BYTES,
    }


def _moments(machine: Machine, work: Compression, index: int, rank: int) -> Iterator[dict[str, float]]:
    """What is in a GPU's memory beside states and the layer, at each moment of layer `index` that may be the peak.

    The sums are copied once when they are whole. They go as their matrices come; the matrix before stays until the next one is solved, and
    what is written of the layer until it is on the disk.
    """
    matrices = _layers(work)[index]
    sums, batch = _hessians(work, matrices), _batch(work)
    widest = max((one.columns for one in matrices), default=0)
    block = 4.0 * hessian_block(widest) * widest if work.tokens else 0.0
    between = 4.0 * machine.num_ranks * min(widest**2, CHUNK) if machine.num_ranks > 1 and work.tokens else 0.0
    yield {"sums of x x^T": sums, "one batch": batch + block}
    yield {"sums of x x^T": 2 * sums, "between ranks": between}
    ranks = share_out([one.steps for one in matrices], machine.num_ranks, machine.device)
    shards = work.shard_bytes or (0,)  # what only measures writes none
    inside = len(work.layers) + len(work.head)
    stored = shards[min(index + 1, len(shards) - 1) if index < inside else 0]  # the embedding's is outside the layers
    share = stored / max(sum(one.size for one in matrices), 1)
    written = last = 0.0
    for one, owner in zip(matrices, ranks, strict=True):
        if owner == rank:
            solve = _solve_bytes(one, work, machine.device)
            yield {"sums of x x^T": sums, "one solve": solve, "the matrix before": last, "written": written}
            last, written = LAST * one.size, written + share * one.size
        sums -= _hessians(work, [one])
    yield {"one batch": batch, "the matrix before": last, "written": written}


def _solve_bytes(one: MatrixWork, work: Compression, device: str) -> float:
    """Bytes of solving one matrix, beside the sum of its inputs: the most of looking through it, of each step, of its errors."""
    square = one.columns**2 if work.tokens else 0
    step = max(_step_values(each.on_device(device), one.size, square) for each in one.steps)
    return max(4.0 * (one.size + CHECKED * square), 4.0 * step, (4.0 * ERROR_TENSORS + 1) * one.size)


def _step_values(step: Work, size: int, square: int) -> float:
    """Float32 numbers of one step: while its factor is made, and while it goes over the matrix with the factor and a second one."""
    return max(size + step.squares * square, step.temporaries * size + (2 * square if step.squares else 0))
