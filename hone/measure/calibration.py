"""The results of micro-benchmarks of one device of one machine, and their file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from hone.base.durable import write_atomic

Layout = Literal["forward", "input_gradient", "weight_gradient"]
"""Layouts of the factors of a product: x W^T, y W, or y^T x of a linear layer."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_METHOD = 10
"""Version of the method; a change invalidates stored rates on every machine. 2: without other work, with a busy GPU.
3: also gathered rows, the disk, and copies from a GPU to the host. 4: the median of a round's tries, not the least.
5: products of many rows read and write memory that no cache holds. 6: also copies from pinned host memory to a GPU.
7: also the memory of a process. 8: attention by length, and on a GPU the kernels of a training and what it sustains.
9: probes of passes as large as their kernels need. 10: Cholesky factors on a GPU."""

SHAPES = [
    (m, n, k)
    for m in (1, 4, 16, 64, 256, 2048)
    for n, k in ((256, 256), (1024, 256), (256, 1024), (1024, 1024), (4096, 256))
] + [(256, 256, 2048), (1024, 256, 2048), (256, 1024, 2048), (4096, 256, 2048)]
GRADIENT_SHAPES = [
    (m, n, k) for m in (256, 2048) for n, k in ((256, 256), (1024, 256), (256, 1024), (1024, 1024), (4096, 256))
]
GPU_SHAPES = [
    (m, n, k) for m in (1, 16, 256, 4096, 16384) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
]
GPU_GRADIENT_SHAPES = [
    (m, n, k) for m in (2048, 16384) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
]
"""(m, n, k) of the products that are measured, [m, k] x [k, n]: on a CPU and on a GPU, forward, then of both gradients."""
GPU_FACTORS = (1024, 4096, 14336)
"""Columns of the Cholesky factors that are measured on a GPU."""


class MatmulRate(BaseModel):
    """Rate of an [m, k] by [k, n] product without the overhead of starting it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    m: int
    n: int
    k: int
    flops_per_s: PositiveFloat
    layout: Layout = "forward"


class AttentionRate(BaseModel):
    """Rate of causal attention, in FLOPs of the forward pass under the mask (4 per head value and kept pair)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    seq_len: int = Field(256, description="Tokens of a sequence.")
    forward_flops_per_s: PositiveFloat
    train_flops_per_s: PositiveFloat = Field(
        description="Forward FLOPs over the time of forward and backward together."
    )


class Bandwidth(BaseModel):
    """Bytes moved per second (read plus written) by a copy that touches `num_bytes` in all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    bytes_per_s: PositiveFloat


class KernelRate(BaseModel):
    """Bytes per second (read plus written) of a kernel of hone's that passes over memory once, forward and backward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str = Field(description="'rms_norm', 'swiglu', 'rope', 'adamw' or 'widen'.")
    dtype: str
    bytes_per_s: PositiveFloat


class LinearRate(BaseModel):
    """Rate of a linear layer of fp8 products with all its casts, on `m` rows with `n` output and `k` input features."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str = Field(description="One of hone.ops.fp8.recipes.")
    held: bool = Field(description="Whether the codes of the weight are there already.")
    passes: Literal["forward", "trained"] = Field(
        description="The forward pass (2 m n k FLOPs), or with the backward pass (6)."
    )
    m: int
    n: int
    k: int
    flops_per_s: PositiveFloat


class FactorRate(BaseModel):
    """Rate of a Cholesky factor [K, K] in float32, of K^3 / 3 FLOPs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    columns: int
    flops_per_s: PositiveFloat


class CollectiveTime(BaseModel):
    """Seconds of one collective on several ranks, on devices of one kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str = Field(description="'all_reduce', 'reduce_scatter', 'all_gather' or 'all_to_all'.")
    algorithm: str = Field(description="'backend' (NCCL, gloo) or one of hone.parallel.collectives.")
    ranks: int
    num_bytes: int = Field(description="Bytes of the whole tensor, which every rank has before or after.")
    seconds: PositiveFloat


class Calibration(BaseModel):
    """Measured rates of one device, for one or several dtypes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(description="Name of the processor or GPU.")
    threads: int = Field(description="Threads torch used (1 on a GPU).")
    torch: str = Field(description="Version of torch.")
    read_bytes_per_s: PositiveFloat = Field(description="Reading a buffer far larger than the caches.")
    copies: tuple[Bandwidth, ...] = Field(description="Copy bandwidth by size: small buffers stay in a cache.")
    matmuls: tuple[MatmulRate, ...] = Field(description="Matrix product rate by shape and dtype.")
    attentions: tuple[AttentionRate, ...] = Field(description="Attention rate by dtype and length.")
    op_s: PositiveFloat = Field(description="Seconds to start one small operation (dispatch, allocation).")
    exp_per_s: PositiveFloat = Field(description="Elements per second of a softmax over long rows.")
    gathers: tuple[Bandwidth, ...] = Field(
        (), description="Bandwidth of gathering rows of 4 KiB into a new tensor, by size."
    )
    host_bytes_per_s: PositiveFloat | None = Field(None, description="From a GPU into new host memory; None on a CPU.")
    pinned_bytes_per_s: PositiveFloat | None = Field(
        None, description="From pinned host memory to a GPU; None on a CPU."
    )
    mapped_bytes_per_s: PositiveFloat | None = Field(
        None, description="From a mapped file that is in memory to a GPU, as weights are read; None: not measured."
    )
    durable_s: PositiveFloat | None = Field(
        None,
        description="Until a small file and its folder entry are on the current folder's disk; None: not writable.",
    )
    disk_bytes_per_s: PositiveFloat | None = Field(None, description="Writing a large file until it is on that disk.")
    collectives: tuple[CollectiveTime, ...] = Field((), description="Seconds of collectives, measured under torchrun.")
    beside: float | None = Field(
        None,
        description="Of transfers that pass beside products, the part of their seconds by which these take longer; None: not measured.",
    )
    kernels: tuple[KernelRate, ...] = Field((), description="Bandwidth of the kernels of a training on a GPU.")
    fp8: tuple[LinearRate, ...] = Field((), description="Rates of fp8 linears on a GPU that has such products.")
    factors: tuple[FactorRate, ...] = Field((), description="Rate of Cholesky factors on a GPU by their size.")
    sustained: Mapping[str, float] = Field(
        {}, description="By dtype the rate of arithmetic in work that lasts seconds, over that of a call on its own."
    )
    process_bytes: int | None = Field(
        None,
        description="Resident memory of a process that has imported torch and started its threads; None: not known.",
    )
    watts: PositiveFloat | None = Field(None, description="Mean power during the calibration; None: no sensor.")
    idle_watts: PositiveFloat | None = Field(
        None, description="Mean power at rest, with a process that has opened the device; None: no sensor."
    )
    busy: Mapping[str, str] = Field(
        {}, description="The other work that ran meanwhile, for each dtype that was measured beside some."
    )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes with matmul rates."""
        return tuple(dict.fromkeys(rate.dtype for rate in self.matmuls))

    @property
    def with_kernels(self) -> frozenset[str]:
        """Dtypes with the rates of a training's kernels."""
        return frozenset(rate.dtype for rate in self.kernels)

    def kernel_bytes_per_s(self, kernel: str, dtype: str) -> float | None:
        """The bandwidth of `kernel`; None when it was not measured for `dtype`."""
        return next((one.bytes_per_s for one in self.kernels if (one.kernel, one.dtype) == (kernel, dtype)), None)

    def joined(self, other: Calibration | None) -> Calibration:
        """These rates, and those of `other` for dtypes that these lack."""
        if other is None:
            return self
        matmuls = tuple(rate for rate in other.matmuls if rate.dtype not in self.dtypes)
        attentions = tuple(rate for rate in other.attentions if rate.dtype not in self.dtypes)
        more: dict[str, Any] = {"matmuls": (*matmuls, *self.matmuls), "attentions": (*attentions, *self.attentions)}
        more["collectives"] = self.collectives or other.collectives
        more["beside"] = other.beside if self.beside is None else self.beside
        more["factors"] = self.factors or other.factors
        more["kernels"] = (*(rate for rate in other.kernels if rate.dtype not in self.with_kernels), *self.kernels)
        more["fp8"], more["sustained"] = self.fp8 or other.fp8, {**other.sustained, **self.sustained}
        more["busy"] = {**{name: why for name, why in other.busy.items() if name not in self.dtypes}, **self.busy}
        return self.model_copy(update=more)

    @property
    def doubt(self) -> str:
        """Why times predicted with these rates may be too long, with the way out; "" for rates of an idle machine."""
        for why in self.busy.values():
            return (
                f"predicted times may be too long: the rates of {self.device} were measured while {why}; `hone calibrate` "
                "measures them again, best when nothing else runs"
            )
        return ""

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """The best rate measured for `dtype`; None when it was not calibrated."""
        return max((rate.flops_per_s for rate in self.matmuls if rate.dtype == dtype), default=None)

    def table(self) -> list[tuple[str, str]]:
        """Rows (what, value) to print."""
        rows = [("device", self.device), ("threads", str(self.threads)), ("torch", self.torch)]
        rows.append(("memory read", f"{self.read_bytes_per_s / 1e9:.1f} GB/s"))
        for copy in self.copies:
            rows.append((f"copy, {_binary(copy.num_bytes)} touched", f"{copy.bytes_per_s / 1e9:.1f} GB/s"))
        for rate in self.matmuls:
            shape = f"{rate.dtype} matmul {rate.m} x {rate.n} x {rate.k}"
            shape += "" if rate.layout == "forward" else f" ({rate.layout.replace('_', ' ')})"
            rows.append((shape, f"{rate.flops_per_s / 1e9:,.1f} GFLOP/s"))
        for rate in self.attentions:
            of = f"{rate.dtype} attention over {rate.seq_len:,} tokens"
            rows.append((of, f"{rate.forward_flops_per_s / 1e9:,.1f} GFLOP/s"))
            rows.append((f"{of}, trained", f"{rate.train_flops_per_s / 1e9:,.1f} GFLOP/s"))
        for coded in self.fp8:
            what = f"fp8 {coded.recipe} linear {coded.m} x {coded.n} x {coded.k}, {coded.passes}{', held' * coded.held}"
            rows.append((what, f"{coded.flops_per_s / 1e9:,.1f} GFLOP/s"))
        for factor in self.factors:
            rows.append((f"Cholesky factor of {factor.columns:,} columns", f"{factor.flops_per_s / 1e9:,.1f} GFLOP/s"))
        for kernel in self.kernels:
            rows.append((f"{kernel.dtype} {kernel.kernel}", f"{kernel.bytes_per_s / 1e9:,.1f} GB/s"))
        for dtype, share in self.sustained.items():
            rows.append((f"{dtype} arithmetic that lasts", f"{share:.1%} of these rates"))
        rows.append(("start of a small operation", f"{self.op_s * 1e6:.1f} us"))
        rows.append(("softmax", f"{self.exp_per_s / 1e6:,.0f} M elements/s"))
        for gather in self.gathers:
            rows.append((f"gather, {_binary(gather.num_bytes)} touched", f"{gather.bytes_per_s / 1e9:.1f} GB/s"))
        if self.host_bytes_per_s is not None:
            rows.append(("copy to the host", f"{self.host_bytes_per_s / 1e9:.1f} GB/s"))
        if self.pinned_bytes_per_s is not None:
            rows.append(("copy from pinned host memory", f"{self.pinned_bytes_per_s / 1e9:.1f} GB/s"))
        if self.mapped_bytes_per_s is not None:
            rows.append(("copy from a mapped file", f"{self.mapped_bytes_per_s / 1e9:.1f} GB/s"))
        if self.durable_s is not None and self.disk_bytes_per_s is not None:
            rows.append(("small file until it is on disk", f"{self.durable_s * 1e3:.1f} ms"))
            rows.append(("large file until it is on disk", f"{self.disk_bytes_per_s / 1e9:.2f} GB/s"))
        for one in self.collectives:
            what = f"{one.op} on {one.ranks} ranks, {one.algorithm}, {_binary(one.num_bytes)}"
            rows.append((what, f"{one.seconds * 1e6:,.0f} us"))
        if self.beside is not None:
            rows.append(("products beside transfers", f"{self.beside:.0%} of the transfers' seconds longer"))
        if self.process_bytes is not None:
            rows.append(("memory of a process with torch", f"{self.process_bytes >> 20} MiB"))
        if self.watts is not None:
            rows.append(("power while measuring", f"{self.watts:.0f} W"))
        if self.idle_watts is not None:
            rows.append(("power at rest", f"{self.idle_watts:.0f} W"))
        for dtype, why in self.busy.items():
            rows.append((f"{dtype} measured beside other work", why))
        return rows


def read_calibration(identity: dict[str, str]) -> Calibration | None:
    """The calibration stored for `identity` (device, torch version, threads); None when there is no valid one."""
    try:
        return Calibration.model_validate_json(_path(identity).read_text(encoding="utf8"))
    except (OSError, RuntimeError, ValueError):  # no file, no home folder, not UTF-8, not a calibration
        return None


def keep_calibration(identity: dict[str, str], calibration: Calibration) -> Path | None:
    """Writes `calibration` for `identity` under the user's cache folder; returns the file.

    A cache that cannot be written only costs the next run a few seconds: then it warns and returns None.
    """
    try:
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, calibration.model_dump_json(indent=1).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        warnings.warn(f"the calibration cannot be stored and is measured again each time: {error}", stacklevel=2)
        return None
    return path


@contextmanager
def locked(identity: dict[str, str]) -> Iterator[None]:
    """Waits until no other process measures or stores the calibration for `identity`, and keeps the others from it.

    Without a lock where the cache cannot be written or has none: then each process measures for itself.
    """
    try:
        path = _path(identity).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")
    except (OSError, RuntimeError):
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    """The user's cache folder of hone. Raises RuntimeError for a user without a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone"


def _path(identity: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps({**identity, "method": _METHOD}, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"calibration-{digest}.json"


def _binary(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
