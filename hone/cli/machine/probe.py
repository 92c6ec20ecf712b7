"""`hone calibrate --report`: probes the machine, prints the levels of its memory, writes a page, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.measure.calibration import Calibration
    from hone.measure.probe.result import MachineProbe

FOLDER = "machine"
"""Where the report is written unless a folder is named."""


def check(options: Mapping[str, str]) -> None:
    """Raises SpecError for `--quick` without a report, and for a report's folder that is a file."""
    from hone.base.errors import SpecError

    if "quick" in options and "report" not in options:
        raise SpecError(
            "--quick shortens the probe of --report, which is not asked for", fix="add --report, or leave --quick out"
        )
    if options.get("quick", "true") != "true":
        raise SpecError(f"--quick has no value, got {options['quick']}", fix="write --quick")
    if "report" in options and folder_of(options).exists() and not folder_of(options).is_dir():
        raise SpecError(f"--report={folder_of(options)} is a file", fix="name a folder, which is made if it is missing")


def folder_of(options: Mapping[str, str]) -> Path:
    """The folder of the report."""
    return Path(FOLDER if options["report"] == "true" else options["report"])


def report(options: Mapping[str, str], run: Any, calibration: Calibration) -> Path:
    """Probes, prints, stores the probe beside the calibration and writes the report; returns its page."""
    from hone.base.durable import write_atomic
    from hone.measure.probe.result import keep_probe
    from hone.measure.probe.run import probe_machine
    from hone.report.machine.reading import CALIBRATION, PROBE
    from hone.report.machine.write import build

    folder = folder_of(options)
    probe = probe_machine(
        quick="quick" in options, gpus=run.device != "cpu", say=lambda part: run.say(f"measuring: {part}")
    )
    keep_probe(probe)
    folder.mkdir(parents=True, exist_ok=True)
    keep_probe(probe, folder / PROBE)
    write_atomic(folder / CALIBRATION, (calibration.model_dump_json(indent=1) + "\n").encode())
    page = build(folder)
    show(probe)
    print(f"report: {page}")
    return page


def show(probe: MachineProbe) -> None:
    """Prints the levels, nodes, links and what was left out."""
    from rich.console import Console
    from rich.table import Table

    from hone.base.figure import human_bytes

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("level", "size", "ends at", "latency", "read by all threads"):
        table.add_column(title, justify="left" if title == "level" else "right", no_wrap=True)
    table.add_column("")
    for level in (*probe.levels, *(level for gpu in probe.gpus for level in gpu.levels)):
        size, ends = (human_bytes(one) if one else "" for one in (level.size_bytes, level.knee_bytes))
        latency = time_words(level.latency_s.value) if level.latency_s else ""
        rate = rate_words(level.bytes_per_s.value) if level.bytes_per_s else ""
        table.add_row(level.name, size, ends, latency, rate, level.note)
    nodes = len(probe.topology.nodes)
    where = f"{nodes} NUMA nodes" if nodes > 1 else "one NUMA node"
    console.print(f"{probe.processor}, {len(probe.topology.cpus)} logical processors, {where}\n", markup=False)
    console.print(table)
    for one in probe.streams:
        console.print(f"{one.kernel} by {one.threads} threads: {rate_words(one.bytes_per_s.value)}", markup=False)
    for note in probe.notes:
        console.print(f"- {note}", markup=False, soft_wrap=True)


def time_words(seconds: float) -> str:
    """'1.64 ns', '35.2 us'."""
    for scale, unit in ((1e-6, "ns"), (1e-3, "us"), (1.0, "ms")):
        if seconds < scale:
            return f"{seconds / scale * 1e3:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate_words(bytes_per_s: float) -> str:
    """'11.6 GB/s'."""
    return f"{bytes_per_s / 1e9:,.3g} GB/s" if bytes_per_s < 1e12 else f"{bytes_per_s / 1e12:.3g} TB/s"
