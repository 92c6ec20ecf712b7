"""Cost of compressing a model layer by layer: seconds and peak memory, from shapes alone.

The engine computes layer i while a thread writes layer i - 1, so the slower of computing and writing counts. With several
ranks the one with most to do counts. Constants are measured where no calibration has the rate;
each names the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hone.base.figure import Estimate, human_bytes
from hone.base.ranks import CHUNK
from hone.cost.activations.segments import saved_values
from hone.cost.dims import ModelDims
from hone.cost.files import Disk
from hone.cost.memory import BYTES, FORWARD_GAPS, forward_bytes
from hone.cost.ranks import link_bytes_per_s
from hone.cost.roofline import seconds, speed_of_light
from hone.cost.steps import COMPARED, forward_seconds, loss_seconds
from hone.measure.machine import Machine

HOST_BYTES_PER_S = 1.5e9
"""Without a calibration, copying from a GPU into host memory that is not pinned (8.6 GB in 5.7 s from an H200)."""

LAYER_OPS = 1000
"""Time of opening the checkpoint, building a layer and writing its shard, in operation starts; most of it is Python."""

MATRIX_OPS = 200
"""The same for each matrix: names, tensors, hooks, errors."""

LOAD_BYTES = 60.0
"""Bytes a weight, at the rate of a large copy, to read it from the mapped file, widen, check and stack it. Most of the time
is page faults of new tensors (two-core AMD EPYC: 3 ns a weight)."""

REPORT_BYTES = 60.0
"""Bytes per weight of both errors, the number of zeros, and dequantization of the stored form."""

DEQUANTIZE_BYTES = 80.0
"""Bytes a weight of unpacking codes and multiplying scales, at the rate of a large copy (10 ns, two-core AMD EPYC)."""

FP32_SHARE = 0.6
"""Fraction of a GPU's float32 rate on its data sheet that factorization and error products reach."""

CODE_BYTES = 28 << 20
"""Bytes that the engine's modules, safetensors and LAPACK bring into memory while a CPU compresses (torch 2.13)."""

OBSERVED_BYTES = 24.0
"""Bytes per activation of which a mean, a norm or a cosine is taken: float32 temporaries, written and read."""
_LARGE = 1 << 28
FLOPS_PER_BYTE, FLOPS_PER_OP = 12.0, 1e8
"""Float32 operations in the time that a processor moves a byte, and starts an operation, to compare solves by
(H200: 67 TFLOP/s, 4.3 TB/s; between its 5 us a start and the 1 us of two CPU cores)."""

OF_LINKS = 0.5
"""What a rank receives while others send to it, of the rate that `hone.cost.ranks` assumes. Not measured here."""


@dataclass(frozen=True)
class Work:
    """Work of a step on one matrix: floating-point operations, bytes moved, tensor operations started."""

    flops: float = 0.0
    num_bytes: float = 0.0
    num_ops: float = 0.0
    temporaries: float = 6.0
    """Float32 tensors of the matrix's size that exist at once."""
    on_gpu: Work | None = None
    """The work on a GPU, where its bytes and operations differ: no cache holds what it moves, and kernels start less often."""

    def on_device(self, device: str) -> Work:
        """The work on `device`."""
        return self.on_gpu if self.on_gpu is not None and device.startswith("cuda") else self


SWEEP_BYTES = 300.0
"""Bytes a weight of a sweep over columns (`hone.solvers.sweep`), at the rate of a large copy."""
COLUMN_OPS, BLOCK_LAUNCHES = 17, 12
"""Its operation starts: of a column without a GPU, five operations and the slices between; of 64 columns on one."""
BLOCK_MASK, GROUP_MASK, GPU_MASK = (800.0, 100), (100.0, 170), (100.0, 25)
"""Bytes a weight and operation starts of choosing masks: of 64 columns, of each column of a pattern's group (one Xeon core: 50
and 44 ns a weight), and of 64 columns on a GPU, counted, not measured; there a pattern's are chosen in the sweep's kernel."""


def sweep_work(rows: int, columns: int, before: Work, sparsity: float, group: int, sweeps: int = 1) -> Work:
    """`before`, one Cholesky factor, and each sweep: half a product, the loop, and masks of `group` columns (0: of blocks)."""
    blocks, none = columns / 64, (0.0, 0)
    masks, choices, gpu_masks = (BLOCK_MASK, blocks, GPU_MASK) if sparsity else (none, 0.0, none)
    if sparsity and group:
        masks, choices, gpu_masks = (GROUP_MASK[0] * group, GROUP_MASK[1]), columns / group, none
    assert before.on_gpu is not None
    on_cpu, on_gpu = (
        replace(
            one,
            flops=columns**3 / 3 + sweeps * rows * columns**2,
            num_bytes=one.num_bytes + sweeps * (SWEEP_BYTES + chosen[0]) * rows * columns,
            num_ops=one.num_ops + sweeps * (ops + chosen[1] * count),
        )
        for one, ops, chosen, count in (
            (before, COLUMN_OPS * columns, masks, choices),
            (before.on_gpu, BLOCK_LAUNCHES * blocks, gpu_masks, blocks),
        )
    )
    return replace(on_cpu, on_gpu=on_gpu)


@dataclass(frozen=True)
class MatrixWork:
    """One matrix [rows, columns], the work of each step on it, and the fraction of the calibration tokens that it reads."""

    rows: int
    columns: int
    steps: tuple[Work, ...]
    share: float = 1.0

    @property
    def size(self) -> int:
        return self.rows * self.columns


def share_out(works: Sequence[Sequence[Work]], num_ranks: int, device: str) -> list[int]:
    """The rank that does each of `works`, the steps of one matrix: by shapes alone, so that all ranks agree."""
    costs = []
    for steps in works:
        here = [step.on_device(device) for step in steps]
        costs.append(sum(one.flops + FLOPS_PER_BYTE * one.num_bytes + FLOPS_PER_OP * one.num_ops for one in here))
    return balanced(costs, num_ranks)


def balanced(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank of each of `costs`: the largest first, each to the rank with least so far."""
    taken, ranks = [0.0] * num_ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        rank = min(range(num_ranks), key=lambda rank: (taken[rank], rank))
        ranks[place] = rank
        taken[rank] += costs[place]
    return ranks


class Passes(NamedTuple):
    """The passes over all calibration tokens by which a structured pruner measures importances."""

    forward: float
    """Forward passes through all layers."""
    logits: int = 0
    """Passes through the head."""
    variants: int = 1
    """Hidden states of all calibration tokens that are in memory at once."""
    observed: int = 0
    """Activations per token that are read besides."""


@dataclass(frozen=True)
class Compression:
    """A compression in numbers: the matrices of each layer, shard sizes (the first outside the layers, the last of `head`),
    calibration."""

    dims: ModelDims
    layers: tuple[tuple[MatrixWork, ...], ...]
    shard_bytes: tuple[int, ...]
    stored_width: int
    """Bytes of a weight in the checkpoint."""
    dtype: str
    """Dtype of the forward passes."""
    num_sequences: int = 0
    """Calibration sequences; 0 without calibration."""
    seq_len: int = 0
    batch_size: int = 1
    measured: tuple[tuple[Compression, Passes], ...] = ()
    """The passes of structured pruners before, each with the model on which it runs, whose matrices and shards do not count."""
    paired: bool = False
    """Whether the inputs of the model that is not compressed are computed as well, and their products with the others."""
    range_bytes: float = 0.0
    """Bytes moved for each value of a linear's input by the statistics of its range."""
    rounding_bytes: float = 0.0
    """The same for rounding it in the second pass, which then dequantizes the weights for every batch."""
    cache_bytes: float = 0.0
    """Bytes moved for each token and layer by the statistics of keys and values, in a pass of their own; 0 without it."""
    check_sequences: int = 0
    """Sequences on which the predictions of both models are compared at the end."""
    ends_bytes: float = 0.0
    """Bytes moved besides for each weight outside the layers."""
    adapter_bytes: int = 0
    """Bytes of an adapter, which is written layer by layer and once more as a whole."""
    probes: int = 0
    """Sequences that the whole uncompressed model, held in memory, computes besides: each matrix changed in turn."""
    differentiated: int = 0
    """Sequences on which that model is differentiated, one at a time."""
    head: tuple[tuple[MatrixWork, ...], ...] = ()
    """The head's matrix, as a layer after the last one whose forward pass is not needed; empty where it is not compressed."""
    embedding: tuple[tuple[MatrixWork, ...], ...] = ()
    """The embedding's matrix, which is rounded first of all; empty where it is not compressed."""

    @property
    def tokens(self) -> int:
        """Calibration tokens."""
        return self.num_sequences * self.seq_len

    @property
    def states_bytes(self) -> int:
        """Bytes of the hidden states of all calibration tokens."""
        return (1 + self.paired) * self.tokens * self.dims.hidden_size * BYTES[self.dtype]


def compress_seconds(machine: Machine, work: Compression) -> Estimate:
    """Seconds of all layers in order, each loaded, calibrated, solved and evaluated while the one before is written."""
    parts: dict[str, float] = {}
    forward, bound = _forward(machine, work)
    share = _share(machine, work)
    outside = work.dims.num_params - sum(work.dims.layer_params)
    disk = Disk.of(machine)
    ends = _passes(machine, (20.0 + work.ends_bytes) * outside) + disk.seconds(work.shard_bytes[0], files=1)
    ends += sum(_solve(machine, one, step) for each in work.embedding for one in each for step in one.steps)
    now = written = ends
    count = len(work.layers)
    for index, matrices in enumerate((*work.layers, *work.head)):
        last = index + 1 == count + len(work.head)
        passed = forward if index < count else 0.0
        spent = {
            "loading and Python": _load(machine, work, index),
            "statistics": share * _statistics(machine, work, matrices, passed),
            "ranges of inputs": share * _inputs(machine, work, matrices, work.range_bytes),
            "between ranks": _merged(machine, work, matrices),
            "keys and values": share * (forward + _passes(machine, work.cache_bytes * work.tokens))
            if work.cache_bytes and index < count
            else 0.0,
            "second pass": 0.0 if last else share * (forward + _round(machine, work, matrices)),
        }
        spent["solvers"], spent["errors"] = _solved(machine, work, matrices)
        for name, value in spent.items():
            parts[name] = parts.get(name, 0.0) + value
        now = max(now + sum(spent.values()), written)
        # Weights, time spent, and the marker that the layer is whole.
        written = now + disk.seconds(work.shard_bytes[index + 1], files=3)
    if work.adapter_bytes:
        written += disk.seconds(2 * work.adapter_bytes, files=count + 2)
    written += disk.seconds(0, files=4)  # index, config, generation config and the rows of the report
    parts["embedding and head"] = ends
    parts["waiting for the disk"] = max(written - sum(parts.values()), 0.0)
    importances, bounds = 0.0, []
    for model, passes in work.measured:
        value, limit = _importance_seconds(machine, model, passes)
        importances += value
        bounds.append(limit)
    parts["importances"] = importances
    parts["check"] = _compared(machine, work, forward, work.check_sequences, models=2)
    parts["divergences"] = _compared(machine, work, forward, work.probes, models=1)
    # A backward pass is two forward passes.
    parts["gradients"] = _compared(machine, work, forward, 3 * work.differentiated, models=1)
    formula = " + ".join(f"{name} {value:.3g} s" for name, value in parts.items() if value)
    bound = any((bound, machine.calibration is None, *bounds))
    more = importances + parts["check"] + parts["divergences"] + parts["gradients"]
    return Estimate(value=written + more, unit="s", formula=formula, bound=bound)


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
    share, checked = _share(machine, work), _share(machine, work, work.check_sequences)
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


def _importance_seconds(machine: Machine, work: Compression, passes: Passes) -> tuple[float, bool]:
    """Seconds of measuring importances on the model of `work`; whether that is a bound."""
    (forward, bound), share = _forward(machine, work), _share(machine, work)
    count = len(work.layers)
    outside = work.dims.num_params - sum(work.dims.layer_params)
    head = (work.tokens, work.dims.vocab_size, work.dims.hidden_size)
    value = share * passes.forward * count * forward + sum(_load(machine, work, index) for index in range(count))
    value += _passes(machine, 20.0 * outside + share * OBSERVED_BYTES * passes.observed * work.tokens)
    value += share * passes.logits * seconds(machine, matmul=head, dtype=work.dtype).value
    return value, bound


def _share(machine: Machine, work: Compression, sequences: int | None = None) -> float:
    """The fraction of the calibration (or of other `sequences`) on the rank that has most: whole batches of it."""
    batches = -(-(work.num_sequences if sequences is None else sequences) // work.batch_size)
    return -(-batches // machine.num_ranks) / batches if batches else 0.0


def _merged(machine: Machine, work: Compression, matrices: Sequence[MatrixWork]) -> float:
    """Seconds in which a rank receives the sums of the others, and the matrices that they read and solved."""
    others = machine.num_ranks - 1
    sums = 4 * (1 + work.paired) * sum(one.columns**2 for one in matrices) if work.tokens else 0
    weights = (1 + work.stored_width) * sum(one.size for one in matrices)  # as given and as stored
    rate = OF_LINKS * link_bytes_per_s(machine.device, machine.num_ranks, machine.processor)
    return (others * sums + min(others, 1) * weights) / rate


def _solved(machine: Machine, work: Compression, matrices: Sequence[MatrixWork]) -> tuple[float, float]:
    """Seconds of the steps and of the errors, on the rank that has most of them."""
    ranks = share_out([one.steps for one in matrices], machine.num_ranks, machine.device)
    spent = [(0.0, 0.0)] * machine.num_ranks
    for one, rank in zip(matrices, ranks, strict=True):
        solved, evaluated = spent[rank]
        solved += sum(_solve(machine, one, step) for step in one.steps)
        spent[rank] = (solved, evaluated + _evaluate(machine, one, calibrated=bool(work.tokens)))
    return max(spent, key=sum)


def _compared(machine: Machine, work: Compression, forward: float, sequences: int, models: int) -> float:
    """Seconds of comparing predictions on `sequences`: the layers of `models`, both heads, and the comparison."""
    if not sequences or not work.tokens:
        return 0.0
    tokens, vocab_size = sequences * work.seq_len, work.dims.vocab_size
    layers = models * len(work.layers) * forward * sequences / work.num_sequences
    heads = 2 * seconds(machine, matmul=(tokens, vocab_size, work.dims.hidden_size), dtype=work.dtype).value
    whole = layers + heads + COMPARED * loss_seconds(machine, tokens, vocab_size, train=False)
    return whole * (1 / machine.num_ranks if models == 1 else _share(machine, work, sequences))


def _forward(machine: Machine, work: Compression) -> tuple[float, bool]:
    """Seconds of one layer's forward pass over all calibration tokens; whether that is a bound."""
    if not work.tokens or not work.layers:
        return 0.0, False
    batch = min(work.batch_size, work.num_sequences)
    once = forward_seconds(
        work.dims, machine, tokens=batch * work.seq_len, seq_len=work.seq_len, dtype=work.dtype, logit_tokens=1
    )
    return once.value * work.num_sequences / batch / len(work.layers), once.bound


def hessian_block(columns: int) -> int:
    """Rows of the sum of x x^T [columns, columns] that one product computes, from the diagonal to the right.

    Eight blocks leave 9/16 of the products; fewer than 1,024 rows do not keep a GPU busy.
    """
    return max(-(-columns // 8), 1024)


def _statistics(machine: Machine, work: Compression, matrices: tuple[MatrixWork, ...], forward: float) -> float:
    """Seconds of the pass that gathers the sums of x x^T, which a layer without matrices to compress does without."""
    if not work.tokens or not (matrices or work.paired):
        return 0.0
    return (1 + work.paired) * (forward + _gather(machine, work, matrices))


def _gather(machine: Machine, work: Compression, matrices: Iterable[MatrixWork]) -> float:
    """Seconds of the sums of x x^T of every matrix's input."""
    batch = min(work.batch_size, work.num_sequences)
    tokens, batches, total = batch * work.seq_len, work.num_sequences / batch, 0.0
    for columns, read in [(one.columns, round(one.share * tokens)) for one in matrices]:
        blocks = -(-columns // hessian_block(columns))
        share = (blocks + 1) / (2 * blocks)
        product = seconds(machine, matmul=(columns, columns, read), num_ops=3 * blocks, dtype=work.dtype).value
        added = _passes(machine, 12.0 * columns * columns) if machine.device.startswith("cuda") else 0.0
        total += batches * share * (product + added)
    return total


def _inputs(machine: Machine, work: Compression, matrices: Iterable[MatrixWork], num_bytes: float) -> float:
    """Seconds of moving `num_bytes` for each value of every matrix's input."""
    values = work.tokens * sum(one.share * one.columns for one in matrices)
    return _passes(machine, num_bytes * values) if num_bytes else 0.0


def _round(machine: Machine, work: Compression, matrices: Iterable[MatrixWork]) -> float:
    """Seconds that rounding of inputs adds to a forward pass."""
    if not work.rounding_bytes or not work.tokens:
        return 0.0
    batches = -(-work.num_sequences // work.batch_size)
    weights = _passes(machine, DEQUANTIZE_BYTES * batches * sum(one.size for one in matrices))
    return weights + _inputs(machine, work, matrices, work.rounding_bytes)


def _load(machine: Machine, work: Compression, index: int) -> float:
    """Seconds of reading a layer's weights, of which a rank reads a part, and of building it."""
    matrices = (*work.layers, *work.head)[index]
    weights = work.dims.layer_params[index] if index < len(work.layers) else sum(one.size for one in matrices)
    ops = LAYER_OPS + MATRIX_OPS * len(matrices)
    if machine.device.startswith("cuda"):
        read = weights * work.stored_width / machine.num_ranks / _host_rate(machine)
        return read + _starts(machine, ops)
    return _passes(machine, LOAD_BYTES * weights) + _starts(machine, ops)


def _solve(machine: Machine, one: MatrixWork, step: Work) -> float:
    step = step.on_device(machine.device)
    return _products(machine, step.flops) + _passes(machine, step.num_bytes) + _starts(machine, step.num_ops)


def _evaluate(machine: Machine, one: MatrixWork, *, calibrated: bool) -> float:
    """Seconds of the errors of the weights and of the outputs: two products with the Hessian."""
    products = _products(machine, 4.0 * one.rows * one.columns**2) if calibrated else 0.0
    return products + _passes(machine, (REPORT_BYTES + (30 if calibrated else 0)) * one.size)


def _solve_bytes(one: MatrixWork, work: Compression) -> float:
    held = max(step.temporaries for step in one.steps) * one.size
    return 4.0 * (held + (4 * one.columns**2 if work.tokens else 0))


def _host_rate(machine: Machine) -> float:
    """Bytes/s between a GPU and host memory that is not pinned."""
    calibration = machine.calibration
    return (calibration.host_bytes_per_s if calibration is not None else None) or HOST_BYTES_PER_S


def _passes(machine: Machine, num_bytes: float) -> float:
    """Seconds of passes over tensors that do not fit a cache."""
    return seconds(machine, num_bytes=num_bytes, op_bytes=_LARGE).value


def _starts(machine: Machine, num_ops: float) -> float:
    return seconds(machine, num_ops=num_ops).value


def _products(machine: Machine, flops: float) -> float:
    """Seconds of products and factorizations in float32."""
    calibration = machine.calibration
    if calibration is not None and "float32" in calibration.dtypes:
        return seconds(machine, flops=flops).value
    return flops / (FP32_SHARE * speed_of_light(machine, "float32")[0])
