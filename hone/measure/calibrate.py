"""Micro-benchmarks of one device: bandwidth, matrix product rates, the cost of starting an operation."""

from __future__ import annotations

import errno
import itertools
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hone.base.durable import write_atomic
from hone.measure.calibration import (
    GPU_FACTORS,
    GPU_GRADIENT_SHAPES,
    GPU_SHAPES,
    GRADIENT_SHAPES,
    LAYOUTS,
    SHAPES,
    Bandwidth,
    Calibration,
    Layout,
    MatmulRate,
    keep_calibration,
    locked,
    read_calibration,
)
from hone.measure.energy import Meter, at_rest
from hone.measure.factors import factor_probes, factor_rates
from hone.measure.load import Load, processor_load
from hone.measure.machine import Machine, describe, identity
from hone.measure.memory import give_back, resident_bytes
from hone.measure.scratch import here, scratch
from hone.measure.timer import Probe, Timer
from hone.measure.training import (
    Kernels,
    attention,
    attention_rates,
    gpu_attention,
    kernel_rates,
    linear_rates,
    sustained,
)
from hone.measure.warm import warm_up

BUDGET_S, GPU_BUDGET_S = 4.0, 8.0
"""Most seconds of measuring a dtype; on a slow machine there are fewer repetitions, not fewer points. A GPU has more points."""

ROUNDS = 3
"""Number of measurements of every point, interleaved with the others, so that a short disturbance affects few of them."""

_SPREAD = 1.4
"""Slowest round over fastest, in the median of all points, from which the machine counts as busy. On one core, with other
work on the neighbouring core, it was 1.1."""

_SHARE = 0.8
"""Fraction of the processors used that other work must leave free for a valid calibration."""

_ATTENTION = (4, 8, 256, 32)
_COLD_BYTES, _WIDE_COLD_BYTES, _GPU_COLD_BYTES = 1 << 24, 1 << 27, 1 << 28
"""Bytes that the operands of successive calls are spread over: few rows multiply a model's weights, which the last cache
may hold; many rows are activations of a long pass, which no cache holds."""
_COPY_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
_GATHER_BYTES = (1 << 18, 1 << 21, 1 << 24, 1 << 26)
_PAGE_BYTES = 4096
_READ_BYTES, _GPU_READ_BYTES = 1 << 28, 1 << 30
_FILE_BYTES = 1 << 25

_LARGE_PROCESS = 1 << 30
"""Bytes from which a process holds more than torch: a notebook with a model in it says nothing of a command's, so what was measured before stays."""


class Disturbed(UserWarning):
    """Rates were measured beside other work."""


def calibrate(
    device: str = "cpu",
    dtype: str | None = None,
    *,
    fresh: bool = False,
    kernels: Kernels | None = None,
    keep: bool = True,
) -> Calibration:
    """Rates of `device` for `dtype`, measured in about 5 s on two cores, then stored in the user's cache folder.

    `dtype` defaults to float32 on a CPU and bfloat16 on a GPU. On a GPU the `kernels` of a training are measured, too. Returns the
    stored rates unless `fresh`, or they lack these; rates of other dtypes measured earlier stay. Of several processes at once one measures, and the others wait for its rates. Rates
    measured beside other work are stored too, marked as such (`Calibration.busy`), but never in the place of better ones.
    """
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    machine = describe(device)
    who = identity(machine)
    kernels = kernels if device.startswith("cuda") else None

    def stored() -> Calibration | None:
        kept = read_calibration(who)
        whole = kept is not None and dtype in kept.dtypes and (kernels is None or dtype in kept.with_kernels)
        return kept if whole and not fresh else None

    found = stored()
    if found is not None:
        return found
    with locked(who):
        found = stored()  # another process may have measured it in between
        if found is None:
            found = _measured(machine, dtype, read_calibration(who), kernels, keep=keep)
        elif found.doubt:
            warnings.warn(found.doubt, Disturbed, stacklevel=2)
        describe.cache_clear()
    return found


def _measured(
    machine: Machine, dtype: str, kept: Calibration | None, kernels: Kernels | None, *, keep: bool
) -> Calibration:
    """The rates of `machine` for `dtype`, measured now; with `keep` they are stored with those in `kept` unless these are better."""
    timer = Timer(machine.device)
    warm_up(machine.device)
    give_back()
    idle_watts = at_rest(machine.device)
    process_bytes = resident_bytes() if resident_bytes() < _LARGE_PROCESS else kept and kept.process_bytes
    threads = 1 if timer.cuda else torch.get_num_threads()
    before, meter = processor_load(), Meter(machine.device)
    probes = _probes(timer, dtype)
    probes |= kernels(machine.device, dtype) if kernels is not None else {}
    with scratch(here()) as folder:
        probes |= _disk(folder)
        probes |= _mapped(folder, machine.device) if timer.cuda and folder is not None else {}
        meter.start()
        begun = time.perf_counter()
        seconds = rounds(timer, probes)
        best = {name: min(each) for name, each in seconds.items()}
        lasting = sustained(timer, dtype, probes, best) if timer.cuda else {}
        joules, took = meter.joules(), time.perf_counter() - begun
        meter.stop()
    after = processor_load()
    disturbed = disturbance(before, after, threads, seconds)
    calibration = _rates(machine, dtype, threads, kept, timer.cuda, probes, seconds)
    busy = {name: why for name, why in (kept.busy if kept else {}).items() if name != dtype}
    busy |= {dtype: disturbed} if disturbed else {}
    more: dict[str, Any] = {"watts": joules / took if joules else None, "busy": busy, "process_bytes": process_bytes}
    more["idle_watts"] = idle_watts or (kept and kept.idle_watts)
    more["sustained"] = {**(kept.sustained if kept else {}), **lasting}
    calibration = calibration.model_copy(update=more)
    if not disturbed:
        if keep:
            keep_calibration(identity(machine), calibration)
        return calibration
    if not keep:
        said = "they are not stored"
    elif kept is not None and dtype in kept.dtypes and dtype not in kept.busy:
        said = "the rates that were stored before stay"
    else:
        said = "these rates are used until `hone calibrate` measures them again, best when nothing else runs"
        # What does not depend on the dtype (copies, the disk) stays as it was measured without other work.
        undisturbed = kept is not None and not kept.busy
        keep_calibration(identity(machine), kept.joined(calibration) if kept and undisturbed else calibration)
    warnings.warn(
        f"{machine.processor} was busy while it was calibrated: {disturbed}. Predicted times may be too long; {said}",
        Disturbed,
        stacklevel=3,
    )
    return calibration


def calibrate_all(
    device: str,
    dtypes: Iterable[str],
    known: Calibration | None = None,
    *,
    fresh: bool = False,
    kernels: Kernels | None = None,
    keep: bool = True,
) -> Calibration | None:
    """`calibrate` for each of `dtypes`, joined with `known`: where the user's cache cannot be written, no later call finds
    what an earlier one measured."""
    for dtype in dtypes:
        known = calibrate(device, dtype, fresh=fresh, kernels=kernels, keep=keep).joined(known)
    return known


def disturbance(before: Load, after: Load, threads: int, seconds: Mapping[Hashable, Sequence[float]]) -> str:
    """Describes other work on the machine between two loads, or how far the rounds of `seconds` differ; "" when idle."""
    others = after.others_since(before)
    if after.num_processors - others < _SHARE * threads:
        return f"other work took {others:.1f} of its {after.num_processors} processors"
    apart = statistics.median(max(each) / min(each) for each in seconds.values())
    if apart > _SPREAD:
        return f"the same work took up to {apart:.1f} times as long in one round as in another"
    return ""


def rounds(timer: Timer, probes: Mapping[Hashable, Probe]) -> dict[Hashable, list[float]]:
    """Seconds of every probe in each of ROUNDS rounds over all of them, after one warm-up call each.

    There are fewer rounds where they take more than the budget, on a busy or very slow machine.
    """
    seconds: dict[Hashable, list[float]] = {name: [] for name in probes}
    begun = timer.clock()
    for turn in range(ROUNDS):
        if turn and timer.clock() - begun > (GPU_BUDGET_S if timer.cuda else BUDGET_S):
            break
        for name, probe in probes.items():
            with torch.set_grad_enabled(probe.wants_grad):
                if turn == 0:
                    probe.work()
                    timer.wait()
                seconds[name].append(timer.typical(probe, probe.budget_s / ROUNDS))
    return seconds


def _rates(
    machine: Machine,
    dtype: str,
    threads: int,
    kept: Calibration | None,
    cuda: bool,
    probes: Mapping[Any, Probe],
    seconds: Mapping[Any, Sequence[float]],
) -> Calibration:
    """The best round of every probe (others may use the machine too) as rates, together with those of other dtypes in `kept`."""
    best = {name: min(each) for name, each in seconds.items()}
    op_s = best["op"]

    def rate(name: Hashable, *, started: bool = False) -> float:
        """Amount per second; `started` subtracts the start of the operation where it does not overlap the one before."""
        took = best[name]
        if started and not (cuda and took > 4 * op_s):
            took = max(took - op_s, took / 4)
        return probes[name].amount / took

    matmuls = tuple(
        MatmulRate(
            dtype=dtype,
            **dict(zip("mnk", _product(*name))),
            flops_per_s=rate(name, started=not cuda),
            layout=name[0],
        )
        for name in best
        if name[0] in LAYOUTS
    )
    names = list(best)
    coded = linear_rates(rate, names)
    copies, gathers = ([name for name in best if name[0] == kind] for kind in ("copy", "gather"))
    # A disk has no best case to wait for: its cache is full or empty, and others write too.
    durable_s, disk_bytes_per_s = (kept.durable_s, kept.disk_bytes_per_s) if kept else (None, None)
    if "large file" in seconds:
        durable_s, large_s = (statistics.median(seconds[name]) for name in ("small file", "large file"))
        disk_bytes_per_s = _FILE_BYTES / max(large_s - durable_s, large_s / 4)
    return Calibration(
        device=machine.processor,
        threads=threads,
        torch=str(machine.torch),
        read_bytes_per_s=rate("read"),
        copies=tuple(Bandwidth(num_bytes=name[1], bytes_per_s=rate(name, started=True)) for name in copies),
        matmuls=(*_others(kept.matmuls if kept else (), dtype), *matmuls),
        attentions=(*_others(kept.attentions if kept else (), dtype), *attention_rates(dtype, rate, names)),
        kernels=(*_others(kept.kernels if kept else (), dtype), *kernel_rates(dtype, rate, names)),
        fp8=coded or (kept.fp8 if kept else ()),
        factors=factor_rates(rate, names) or (kept.factors if kept else ()),
        gathers=tuple(Bandwidth(num_bytes=name[1], bytes_per_s=rate(name, started=True)) for name in gathers),
        host_bytes_per_s=rate("to host") if cuda else None,
        pinned_bytes_per_s=rate("from host") if cuda else None,
        mapped_bytes_per_s=rate("mapped") if "mapped" in best else kept and kept.mapped_bytes_per_s,
        durable_s=durable_s,
        disk_bytes_per_s=disk_bytes_per_s,
        collectives=kept.collectives if kept else (),
        beside=kept.beside if kept else None,
        op_s=op_s,
        exp_per_s=rate("softmax"),
    )


def _others(rates: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    return tuple(rate for rate in rates if rate.dtype != dtype)


def _probes(timer: Timer, dtype: str) -> dict[Any, Probe]:
    """All probes by name; products by (layout, rows, outputs, inputs), copies by ("copy", bytes)."""
    forward, gradients = (GPU_SHAPES, GPU_GRADIENT_SHAPES) if timer.cuda else (SHAPES, GRADIENT_SHAPES)
    layouts: list[tuple[Layout, list]] = [
        ("forward", forward),
        ("input_gradient", gradients),
        ("weight_gradient", gradients),
    ]
    names = [(layout, *shape) for layout, shapes in layouts for shape in shapes]
    share_s = BUDGET_S / 2 / len(names)
    numbers = _Numbers(timer, dtype, max(_set_size(*shape) for _, *shape in names))
    small = torch.ones(64, device=timer.device)
    probes: dict[Any, Probe] = {"op": Probe(lambda: small + 1.0, 1, 0.1, inner=200)}
    for name in names:
        probes[name] = _matmul(timer, numbers, name, share_s)
    batch, heads, seq_len, head_dim = _ATTENTION
    probes |= (
        gpu_attention(timer.device, dtype)
        if timer.cuda
        else attention(timer.device, dtype, (batch, seq_len, heads, head_dim))
    )
    bytes_ = numbers.flat.view(torch.float32)
    for size in _COPY_BYTES:
        source, target = bytes_[: size // 8], bytes_[-(size // 8) :]
        probes["copy", size] = Probe(lambda target=target, source=source: target.copy_(source), size, 0.05)
    probes["read"] = Probe(lambda: bytes_.view(-1, 4096).sum(1), bytes_.numel() * 4, 0.1)
    pages = bytes_.view(-1, _PAGE_BYTES // 4)
    for size in _GATHER_BYTES:
        index = torch.randperm(len(pages), device=timer.device)[: size // 2 // _PAGE_BYTES]
        probes["gather", size] = Probe(lambda index=index: pages.index_select(0, index), size, 0.05)
    if timer.cuda:
        states = bytes_[: _FILE_BYTES // 4]
        probes["to host"] = Probe(lambda: states.cpu(), _FILE_BYTES, 0.1)
        probes |= factor_probes(timer.device, GPU_FACTORS) if dtype == "float32" else {}
        pinned, target = torch.empty(_FILE_BYTES // 4).pin_memory(), torch.empty_like(states)
        probes["from host"] = Probe(lambda: target.copy_(pinned, non_blocking=True), _FILE_BYTES, 0.1)
    logits = torch.randn(256, 4096, device=timer.device)
    probes["softmax"] = Probe(lambda: torch.log_softmax(logits, -1), logits.numel(), 0.1)
    return probes


def _disk(folder: Path | None) -> dict[str, Probe]:
    """A file of one byte and a large one, written until they are on disk; nothing, with a warning, where that is full."""
    large = bytes(_FILE_BYTES)
    try:
        if folder is None:
            raise OSError(errno.ENOSPC, "no folder can be made")
        write_atomic(folder / "large", large)
    except OSError as error:
        warnings.warn(
            f"the disk of the current folder was not measured: {error.strerror}; times to write are those of a usual one",
            stacklevel=4,
        )
        return {}
    return {
        "small file": Probe(lambda: write_atomic(folder / "small", b"0"), 1, 0.05),
        "large file": Probe(lambda: write_atomic(folder / "large", large), _FILE_BYTES, 0.1),
    }


def _mapped(folder: Path, device: str) -> dict[str, Probe]:
    """A file that is mapped anew and copied to the GPU, as a checkpoint is read; nothing where `_disk` found no room for it."""
    path = folder / "large"
    if not path.exists():
        return {}
    size = path.stat().st_size
    return {"mapped": Probe(lambda: torch.from_file(str(path), size=size, dtype=torch.uint8).to(device), size, 0.1)}


class _Numbers:
    """One buffer, larger than the caches, that all products use slices of: making it once saves a second."""

    def __init__(self, timer: Timer, dtype: str, largest: int) -> None:
        number = getattr(torch, dtype)
        wanted = max(largest * number.itemsize, _GPU_READ_BYTES if timer.cuda else _READ_BYTES)
        # On a CPU the values do not matter, and random ones would take longer than the products; a GPU that multiplies ones
        # draws less power and is a sixth faster than on real values.
        make = torch.randn if timer.cuda else torch.ones
        self.products: deque = deque()  # results kept while the next ones are computed
        self.flat = make(-(-wanted // 16384) * 16384 // number.itemsize, dtype=number, device=timer.device)

    def cut(self, begin: int, *shape: int) -> Any:
        return self.flat[begin : begin + math.prod(shape)].view(shape)


def _product(layout: Layout, rows: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    """(m, n, k) of the product of a linear layer of `outputs` and `inputs` on `rows` rows."""
    return {
        "forward": (rows, outputs, inputs),
        "input_gradient": (rows, inputs, outputs),
        "weight_gradient": (outputs, inputs, rows),
    }[layout]


def _set_size(rows: int, outputs: int, inputs: int) -> int:
    """Number of values of x, weight and y, each aligned to 64."""
    return sum(-(-size // 64) * 64 for size in (rows * inputs, outputs * inputs, rows * outputs))


def _matmul(timer: Timer, numbers: _Numbers, name: tuple[Layout, int, int, int], budget_s: float) -> Probe:
    layout, rows, outputs, inputs = name
    # In a model neither weights nor activations are in the nearest cache: alternate between several of each. A GPU's
    # weights must not come from its second-level cache.
    size, width = _set_size(rows, outputs, inputs), numbers.flat.itemsize
    cold, most = (_GPU_COLD_BYTES, 64) if timer.cuda else (_WIDE_COLD_BYTES, 64) if rows >= 256 else (_COLD_BYTES, 4)
    copies = max(1, min(most, cold // (size * width), numbers.flat.numel() // size))
    sets = []
    for begin in range(0, copies * size, size):
        weight_at = begin + -(-rows * inputs // 64) * 64
        y_at = weight_at + -(-outputs * inputs // 64) * 64
        sets.append(
            (
                numbers.cut(begin, rows, inputs),
                numbers.cut(weight_at, outputs, inputs),
                numbers.cut(y_at, rows, outputs),
            )
        )
    turn, products = itertools.cycle(sets), numbers.products

    def anew() -> None:
        x, weight, y = next(turn)
        while len(products) >= copies:
            products.popleft()
        products.append(x @ weight.T if layout == "forward" else y @ weight if layout == "input_gradient" else y.T @ x)

    def into() -> None:  # on a CPU new memory for every result would measure page faults: a training's heap has few
        x, weight, y = next(turn)
        if layout == "forward":
            torch.mm(x, weight.T, out=y)
        elif layout == "input_gradient":
            torch.mm(y, weight, out=x)
        else:
            torch.mm(y.T, x, out=weight)

    return Probe(
        anew if timer.cuda else into,
        2.0 * math.prod(_product(*name)),
        budget_s,
        inner=min(copies, 8) if not timer.cuda else copies,
    )
