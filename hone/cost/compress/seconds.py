"""Seconds of compressing a model layer by layer, from shapes alone.

The engine computes layer i while a thread fetches and writes layer i - 1, so the slower of computing and writing counts. With several
ranks the one with most to do counts. Constants are measured where no calibration has the rate;
each names the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hone.base.figure import Estimate
from hone.cost.compress.compression import Compression, MatrixWork, Passes, hessian_block
from hone.cost.files import Disk
from hone.cost.ranks import link_bytes_per_s
from hone.cost.roofline import seconds
from hone.cost.steps import COMPARED, forward_seconds, loss_seconds
from hone.cost.work import DEQUANTIZE_BYTES, moved_s, products_s, share_out, started_s, work_seconds
from hone.measure.machine import Machine

HOST_BYTES_PER_S = 1.5e9
"""Without a calibration, copying from a GPU into new host memory that is not pinned (8.6 GB in 5.7 s from an H200)."""

MAPPED_BYTES_PER_S = 6.9e9
"""Without a calibrated rate, copying a file's pages that are in memory to a GPU (`hone calibrate --report`, pageable memory, H200)."""

LAYER_OPS = 1000
"""Time of opening the checkpoint, building a layer and writing its shard, in operation starts; most of it is Python."""

MATRIX_OPS = 200
"""The same for each matrix: names, tensors, hooks, errors."""

LOAD_BYTES = 60.0
"""Bytes a weight, at the rate of a large copy, to read it from the mapped file, widen, check and stack it. Most of the time
is page faults of new tensors (two-core AMD EPYC: 3 ns a weight)."""

REPORT_BYTES = 60.0
"""Bytes per weight of both errors, the number of zeros, and dequantization of the stored form."""

OBSERVED_BYTES = 24.0
"""Bytes per activation of which a mean, a norm or a cosine is taken: float32 temporaries, written and read."""
OF_LINKS = 0.5
"""What a rank receives while others send to it, of the rate that `hone.cost.ranks` assumes. Not measured here."""


def compress_seconds(machine: Machine, work: Compression) -> Estimate:
    """Seconds of all layers in order, each loaded, calibrated, solved and evaluated while the one before is written."""
    parts: dict[str, float] = {}
    forward, bound = _forward(machine, work)
    share = work.share(machine.num_ranks)
    outside = work.dims.num_params - sum(work.dims.layer_params)
    disk = Disk.of(machine)
    ends = moved_s(machine, (20.0 + work.ends_bytes) * outside) + disk.seconds(work.shard_bytes[0], files=1)
    ends += sum(work_seconds(machine, step) for each in work.embedding for one in each for step in one.steps)
    now, written, fetched = ends, ends, 0.0
    count = len(work.layers)
    for index, matrices in enumerate((*work.layers, *work.head)):
        last = index + 1 == count + len(work.head)
        passed = forward if index < count else 0.0
        spent = {
            "loading and Python": _load(machine, work, index),
            "statistics": share * _statistics(machine, work, matrices, passed),
            "ranges of inputs": share * _inputs(machine, work, matrices, work.range_bytes),
            "between ranks": _merged(machine, work, matrices),
            "keys and values": share * (forward + moved_s(machine, work.cache_bytes * work.tokens))
            if work.cache_bytes and index < count
            else 0.0,
            "second pass": 0.0 if last else share * _second(machine, work, matrices, forward),
        }
        spent["solvers"], spent["errors"] = _solved(machine, work, matrices)
        for name, value in spent.items():
            parts[name] = parts.get(name, 0.0) + value
        now = max(now + fetched + sum(spent.values()), written)
        # A GPU copies the layer to the host before the next one's weights, of one stream. Then weights, time spent, the marker that it is whole.
        fetched = _fetched(machine, work.shard_bytes[index + 1])
        written = now + fetched + disk.seconds(work.shard_bytes[index + 1], files=3)
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
    if work.sensitivities is not None:
        parts["sensitivities"] = compress_seconds(machine, work.sensitivities).value
    more = importances + parts.get("sensitivities", 0.0) + parts["check"] + parts["divergences"] + parts["gradients"]
    return Estimate(value=written + more, unit="s", formula=formula, bound=bound)


def _importance_seconds(machine: Machine, work: Compression, passes: Passes) -> tuple[float, bool]:
    """Seconds of measuring importances on the model of `work`; whether that is a bound."""
    (forward, bound), share = _forward(machine, work), work.share(machine.num_ranks)
    count = len(work.layers)
    outside = work.dims.num_params - sum(work.dims.layer_params)
    head = (work.tokens, work.dims.vocab_size, work.dims.hidden_size)
    value = share * passes.forward * count * forward + sum(_load(machine, work, index) for index in range(count))
    value += moved_s(machine, 20.0 * outside + share * OBSERVED_BYTES * passes.observed * work.tokens)
    value += share * passes.logits * seconds(machine, matmul=head, dtype=work.dtype).value
    return value, bound


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
        solved += sum(work_seconds(machine, step) for step in one.steps)
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
    if models == 1:
        return whole / machine.num_ranks
    again = sum(_load(machine, work, index) for index in range(len(work.layers))) if work.reshaped else 0.0
    return whole * work.checked_share(machine.num_ranks) + models * again


def _forward(machine: Machine, work: Compression, codes: str = "") -> tuple[float, bool]:
    """Seconds of one layer's forward pass over all calibration tokens, by `codes` as in `forward_seconds`; whether that is a bound."""
    if not work.tokens or not work.layers:
        return 0.0, False
    batch = min(work.batch_size, work.num_sequences)
    once = forward_seconds(
        work.dims, machine, tokens=batch * work.seq_len, seq_len=work.seq_len, dtype=work.dtype, logit_tokens=1,
        codes=codes,
    )  # fmt: skip
    return once.value * work.num_sequences / batch / len(work.layers), once.bound


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
        added = moved_s(machine, 12.0 * columns * columns) if machine.device.startswith("cuda") else 0.0
        total += batches * share * (product + added)
    return total


def _inputs(machine: Machine, work: Compression, matrices: Iterable[MatrixWork], num_bytes: float) -> float:
    """Seconds of moving `num_bytes` for each value of every matrix's input."""
    values = work.tokens * sum(one.share * one.columns for one in matrices)
    return moved_s(machine, num_bytes * values) if num_bytes else 0.0


def _second(machine: Machine, work: Compression, matrices: Iterable[MatrixWork], forward: float) -> float:
    """Seconds of the pass through the layer as it is written, that of the given one taking `forward`: where inputs are rounded,
    a GPU multiplies codes of 8 bits as such, else inputs are rounded and weights widened in each batch."""
    if not work.rounding_bytes or not work.tokens:
        return forward
    if work.codes and machine.device.startswith("cuda"):
        return _forward(machine, work, codes=work.codes)[0]
    batches = -(-work.num_sequences // work.batch_size)
    weights = moved_s(machine, DEQUANTIZE_BYTES * batches * sum(one.size for one in matrices))
    return forward + weights + _inputs(machine, work, matrices, work.rounding_bytes)


def _load(machine: Machine, work: Compression, index: int) -> float:
    """Seconds of reading a layer's weights, of which a rank reads a part, and of building it."""
    matrices = (*work.layers, *work.head)[index]
    weights = work.dims.layer_params[index] if index < len(work.layers) else sum(one.size for one in matrices)
    ops = LAYER_OPS + MATRIX_OPS * len(matrices)
    if machine.device.startswith("cuda"):
        read = weights * work.stored_width / machine.num_ranks / _mapped_rate(machine)
        return read + started_s(machine, ops)
    return moved_s(machine, LOAD_BYTES * weights) + started_s(machine, ops)


def _evaluate(machine: Machine, one: MatrixWork, *, calibrated: bool) -> float:
    """Seconds of the errors of the weights and of the outputs: two products with the Hessian."""
    shape = one.rows, one.columns, one.columns
    products = products_s(machine, 4.0 * one.rows * one.columns**2, shape) if calibrated else 0.0
    return products + moved_s(machine, (REPORT_BYTES + (30 if calibrated else 0)) * one.size)


def _mapped_rate(machine: Machine) -> float:
    """Bytes/s from a checkpoint's mapped file to a GPU."""
    calibration = machine.calibration
    return (calibration.mapped_bytes_per_s if calibration is not None else None) or MAPPED_BYTES_PER_S


def _fetched(machine: Machine, num_bytes: float) -> float:
    """Seconds in which the writing thread copies a shard from a GPU into new host memory."""
    if not machine.device.startswith("cuda"):
        return 0.0
    calibration = machine.calibration
    return num_bytes / ((calibration.host_bytes_per_s if calibration is not None else None) or HOST_BYTES_PER_S)
