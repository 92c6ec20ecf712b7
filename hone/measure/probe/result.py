"""What a probe of a machine found, and its file beside the calibration."""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from hone.base.durable import write_atomic
from hone.measure.calibration import cache_folder
from hone.measure.topology.read import Topology

VERSION = 1
"""Version of the file's layout and of the method; a file of another one is not read."""


class Sample(BaseModel):
    """The median of several measurements, with the smallest and the largest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The sample of at least one value."""
        return cls(value=statistics.median(values), low=min(values), high=max(values), n=len(values))


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LatencyPoint(_Row):
    """Seconds of one dependent load from a set of lines in random order."""

    num_bytes: int = Field(description="Bytes that the chain of loads covers.")
    seconds: Sample
    huge_pages: bool = Field(False, description="Whether the kernel gave large pages, which need few translations.")


class SizePoint(_Row):
    """Bytes per second of reading a buffer again and again."""

    num_bytes: int
    bytes_per_s: Sample


class Level(_Row):
    """One level of the hierarchy."""

    name: str = Field(description="As 'L2', 'memory', 'GPU L2', 'disk'.")
    device: Literal["host", "gpu"]
    size_bytes: int | None = Field(None, description="As the system or the catalogue says; None: it does not.")
    knee_bytes: int | None = Field(None, description="Where latency rises from this level's to the next one's.")
    latency_s: Sample | None = Field(None, description="Of one dependent load; None: not measured.")
    bytes_per_s: Sample | None = Field(
        None, description="Read by all threads, or by one in `note`; None: not measured."
    )
    note: str = ""


class StreamPoint(_Row):
    """Bandwidth of a STREAM kernel (McCalpin 1995), by its count of bytes: what the program names, not write-allocation."""

    kernel: Literal["copy", "triad", "read"]
    threads: int
    bytes_per_s: Sample


class NodePair(_Row):
    """Processors of one NUMA node on memory of another."""

    cpu_node: int
    memory_node: int
    bytes_per_s: Sample
    latency_s: Sample


class LoadedPoint(_Row):
    """Latency of one chain of loads while other threads read and write memory."""

    threads: int = Field(description="Threads that run triad meanwhile.")
    bytes_per_s: float = Field(description="What these move.")
    latency_s: Sample


class DiskRates(_Row):
    """The disk of one folder."""

    folder: str
    direct: bool = Field(description="Whether the page cache was passed by (O_DIRECT); else its pages were dropped.")
    file_bytes: int
    write_bytes_per_s: Sample | None
    read_bytes_per_s: Sample | None
    read_latency_s: Sample | None = Field(description="One random read of 4 KiB at a time.")


class Transfer(_Row):
    """Bytes per second between a host and a GPU, or inside a GPU."""

    device: int
    what: str = Field(description="As 'host to device, pinned' or 'device copy'.")
    num_bytes: int
    bytes_per_s: Sample
    host_node: int | None = Field(None, description="The NUMA node of the host's memory; None: wherever it was.")


class PeerPair(_Row):
    """A copy from one GPU to another."""

    source: int
    target: int
    direct: bool = Field(description="Whether the GPUs reach each other's memory, without the host.")
    bytes_per_s: Sample
    latency_s: Sample = Field(description="Of a copy of 4 KiB, with its start.")


class GpuProbe(_Row):
    """One GPU."""

    index: int
    name: str
    address: str | None
    node: int | None = Field(description="The NUMA node it is attached to; None: not told.")
    l2_bytes: int | None
    memory_bytes: int
    unified: str = Field("", description='Why it shares the host\'s memory; "": it does not.')
    levels: tuple[Level, ...] = ()
    latency: tuple[LatencyPoint, ...] = ()
    sweep: tuple[SizePoint, ...] = ()
    transfers: tuple[Transfer, ...] = ()


class MachineProbe(_Row):
    """A whole probe."""

    version: Literal[1] = VERSION
    made_at: str = Field(description="Date and time in UTC.")
    seconds: float = Field(description="How long it took.")
    quick: bool
    processor: str
    topology: Topology
    levels: tuple[Level, ...] = ()
    latency: tuple[LatencyPoint, ...] = ()
    bandwidth: tuple[SizePoint, ...] = ()
    streams: tuple[StreamPoint, ...] = ()
    pairs: tuple[NodePair, ...] = ()
    loaded: tuple[LoadedPoint, ...] = ()
    disk: DiskRates | None = None
    gpus: tuple[GpuProbe, ...] = ()
    peers: tuple[PeerPair, ...] = ()
    notes: tuple[str, ...] = Field((), description="What was not measured and why, and what limits the figures.")


def probe_path(processor: str, topology: Topology) -> Path:
    """Where the probe of this machine is kept, beside its calibrations: a file by processor, those that may be used, and PCI devices.

    Raises RuntimeError for a user without a home folder.
    """
    facts = [processor, topology.cpus, [device.address for device in topology.devices if device.kind == "gpu"]]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / f"probe-{digest}.json"


def keep_probe(probe: MachineProbe, path: Path | None = None) -> Path | None:
    """Writes `probe` to `path`, by default that of `probe_path`; returns the file.

    A cache that cannot be written is warned of and gives None; a `path` that was named raises OSError.
    """
    text = (probe.model_dump_json(indent=1) + "\n").encode()
    try:
        file = path or probe_path(probe.processor, probe.topology)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        if path is not None:
            raise
        warnings.warn(f"the probe cannot be stored: {error}", stacklevel=2)
        return None
    return file
