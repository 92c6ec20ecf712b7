"""What the report of a machine shows, once for the page and for Markdown: findings, tables and charts by section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.report import units
from hone.report.machine import charts
from hone.report.machine.charts import Axis, Series
from hone.report.machine.reading import Found, value
from hone.report.machine.roofline import points, roofs
from hone.report.sections.base import FULL, HALF, Panel, both

SIZE, SECONDS, RATE = Axis("bytes", "B"), Axis("latency", "s"), Axis("GB/s", suffix="GB/s")


@dataclass(frozen=True)
class Grid:
    """A table; columns from `numbers` on are right-aligned but the last, where `noted`."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 1
    noted: bool = False


@dataclass(frozen=True)
class Part:
    """One section."""

    id: str
    title: str
    lead: str
    panels: list[Panel] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    list: Sequence[str] = ()


def parts(found: Found) -> list[Part]:
    """The sections that the files give something for, in order."""
    made = [
        _levels(found),
        _threads(found),
        _nodes(found),
        _gpus(found),
        _peers(found),
        _roofline(found),
        _machine(found),
        _notes(found),
    ]
    return [part for part in made if part is not None]


def findings(found: Found) -> list[tuple[str, str, str]]:
    """(value, words, section) of the figures that decide most."""
    said = []
    levels = {level["name"]: level for level in found.rows("levels")}
    if (seconds := value(levels.get("memory", {}).get("latency_s"))) is not None:
        said.append((units.show(seconds, "s"), "until a load from memory is there", "levels"))
    triads = [(value(one["bytes_per_s"]), one["threads"]) for one in found.rows("streams") if one["kernel"] == "triad"]
    best = max(((rate, threads) for rate, threads in triads if rate), default=None)
    if best is not None:
        said.append((rate_words(best[0]), f"triad of memory, {count(best[1], 'thread')}", "threads"))
    for gpu in found.rows("gpus")[:1]:
        rate = next((value(one["bytes_per_s"]) for one in gpu["levels"] if one["name"] == "GPU memory"), None)
        if rate is not None:
            said.append((rate_words(rate), f"read from the memory of {gpu['name']}", "gpus"))
    if found.calibration is not None and (roof := [*roofs(found.calibration)][-1:]):
        said.append((flat(roof[0].peak_flops_per_s, "FLOP/s"), f"best {roof[0].dtype} product", "roofline"))
        said.append(
            (
                units.three(roof[0].ridge),
                f"FLOPs a byte: from there {roof[0].dtype} arithmetic is the limit, not memory",
                "roofline",
            )
        )
    return said


def rate_words(rate: float | None) -> str:
    """'11.6 GB/s', in powers of ten, as memory and links are sold."""
    return units.ABSENT if rate is None else flat(rate, "B/s")


def flat(value: float, unit: str) -> str:
    """'30.5 GFLOP/s': a prefix joined to its unit."""
    number, _, prefix = units.prefixed(value).partition(" ")
    return f"{number} {prefix}{unit}"


def gigabytes(sample: dict[str, Any] | None) -> float | None:
    """The median of a sample of bytes a second, in GB/s."""
    found = value(sample)
    return None if found is None else found / 1e9


def count(number: int, what: str) -> str:
    """'1 thread', '8 threads'."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else units.show_bytes(num_bytes)


def _latency(sample: dict[str, Any] | None) -> str:
    found = value(sample)
    if found is not None and found < 1e-9:
        return f"{units.three(found * 1e9)} ns"
    return "" if found is None else units.show(found, "s")


def _rate(sample: dict[str, Any] | None) -> str:
    return "" if value(sample) is None else rate_words(value(sample))


def _spread(sample: dict[str, Any] | None) -> str:
    if value(sample) is None or sample is None:
        return ""
    return f"{sample['low'] / sample['value']:.2f} to {sample['high'] / sample['value']:.2f} x"


def _levels(found: Found) -> Part:
    gpus = found.rows("gpus")
    levels = found.rows("levels")
    registers = value(levels[0].get("latency_s")) if levels else None
    for gpu in gpus:
        own = f"GPU {gpu['index']}" if len(gpus) > 1 else "GPU"
        levels += [{**level, "name": level["name"].replace("GPU", own)} for level in gpu["levels"]]
    rows = []
    for level in levels:
        latency = value(level.get("latency_s"))
        ticks = f"{latency / registers:,.0f}" if latency and registers and level["device"] == "host" else ""
        cells = [level["name"], _latency(level.get("latency_s")), _rate(level.get("bytes_per_s"))]
        cells += [_size(level.get("size_bytes")), _size(level.get("knee_bytes")), ticks]
        rows.append([*cells, _spread(level.get("latency_s")), level.get("note") or ""])
    head = ["Level", "Latency", "Read by all", "Size", "Ends at", "In operations", "Spread of latency", "Note"]
    panels = []
    curve = found.rows("latency")
    chains = [
        Series(name, [(p["num_bytes"], v) for p in curve if p["huge_pages"] is huge and (v := value(p["seconds"]))])
        for name, huge in (("host, small pages", False), ("host, large pages", True))
    ]
    for gpu in found.rows("gpus")[:1]:
        chains.append(Series("GPU", [(p["num_bytes"], v) for p in gpu["latency"] if (v := value(p["seconds"]))]))
    marks = [
        (level["size_bytes"], level["name"])
        for level in levels
        if level.get("size_bytes") and "memory" not in level["name"]
    ]
    if any(one.points for one in chains):
        chart = both(
            lambda width: charts.curves(
                chains, SIZE, SECONDS, width, "Latency of a dependent load by size", sorted(marks)
            ),
            FULL,
        )
        said = "One load after the other over lines in random order. Dashed lines are the sizes that the system tells; where a curve rises, a level ends."
        panels.append(Panel("Latency by size", chart, said))
    sweeps = [
        Series(
            "host, one thread",
            [(p["num_bytes"], v) for p in found.rows("bandwidth") if (v := gigabytes(p["bytes_per_s"]))],
        )
    ]
    for gpu in found.rows("gpus")[:1]:
        sweeps.append(
            Series("GPU, all of it", [(p["num_bytes"], v) for p in gpu["sweep"] if (v := gigabytes(p["bytes_per_s"]))])
        )
    if any(one.points for one in sweeps):
        chart = both(
            lambda width: charts.curves(sweeps, SIZE, RATE, width, "Bandwidth of reading by size", sorted(marks)), FULL
        )
        panels.append(Panel("Bandwidth of reading by size", chart, "The same buffer again and again, in order."))
    lead = (
        "From registers to the disk: how long one access waits, and how much can be read when many are under way. "
        "In operations: how many dependent register operations fit in that wait."
    )
    return Part("levels", "Levels of memory", lead, panels, [Grid("Levels of memory", head, rows, 1, noted=True)])


def _threads(found: Found) -> Part | None:
    streams, loaded = found.rows("streams"), found.rows("loaded")
    if not streams:
        return None
    kernels = {
        name: [(one["threads"], v) for one in streams if one["kernel"] == name and (v := gigabytes(one["bytes_per_s"]))]
        for name in ("copy", "triad")
    }
    at = sorted({one["threads"] for one in streams})
    x, y = Axis("threads", log=False, at=at), Axis("GB/s", log=False, suffix="GB/s")
    drawn = both(
        lambda width: charts.curves(
            [Series(name, rows) for name, rows in kernels.items()], x, y, width, "STREAM by threads"
        ),
        HALF,
    )
    panels = [
        Panel(
            "Bandwidth by threads",
            drawn,
            "STREAM's count of bytes: what the program names. Lines that a write fetches first are not counted.",
        )
    ]
    curve = [(one["bytes_per_s"] / 1e9, v) for one in loaded if (v := value(one["latency_s"]))]
    if len(curve) > 1:
        x, y = Axis("traffic of other threads, GB/s", log=False, suffix="GB/s"), Axis("latency", "s", log=False)
        drawn = both(
            lambda width: charts.curves([Series("one chain of loads", curve)], x, y, width, "Latency beside traffic"),
            HALF,
        )
        panels.append(
            Panel(
                "Latency beside other traffic",
                drawn,
                "Other threads run triad: queues at the memory make every load wait longer.",
            )
        )
    rows = [
        [one["kernel"], f"{one['threads']:,}", _rate(one["bytes_per_s"]), _spread(one["bytes_per_s"])]
        for one in streams
    ]
    grids = [Grid("STREAM by threads", ["Kernel", "Threads", "Bandwidth", "Spread"], rows)]
    if loaded:
        rows = [
            [
                count(one["threads"], "thread"),
                rate_words(one["bytes_per_s"]) if one["bytes_per_s"] else "none",
                _latency(one["latency_s"]),
            ]
            for one in loaded
        ]
        grids.append(Grid("Latency beside other traffic", ["Other threads", "Their traffic", "Latency"], rows))
    return Part(
        "threads",
        "Threads",
        "What several threads reach together, and what that does to the latency of one.",
        panels,
        grids,
    )


def _nodes(found: Found) -> Part | None:
    pairs = found.rows("pairs")
    if not pairs:
        return None
    memories = sorted({one["memory_node"] for one in pairs})
    cells = {(one["cpu_node"], one["memory_node"]): one for one in pairs}
    head = ["Processors of", *(f"memory of node {node}" for node in memories)]
    grids = []
    for title, shown, name in (
        ("Triad between NUMA nodes", _rate, "bytes_per_s"),
        ("Latency between NUMA nodes", _latency, "latency_s"),
    ):
        rows = [
            [f"node {cpu}", *(shown(cells.get((cpu, node), {}).get(name)) for node in memories)]
            for cpu in sorted({one["cpu_node"] for one in pairs})
        ]
        grids.append(Grid(title, head, rows))
    lead = "All processors of one node on the memory of another. What is off the diagonal is the price of memory on the wrong node."
    return Part("nodes", "NUMA nodes", lead, [], grids)


def _gpus(found: Found) -> Part | None:
    gpus = found.rows("gpus")
    if not gpus:
        return None
    grids = []
    for gpu in gpus:
        rows = [
            [one["what"], "" if one.get("host_node") is None else f"node {one['host_node']}", _size(one["num_bytes"]), _rate(one["bytes_per_s"]), _spread(one["bytes_per_s"])]
            for one in gpu["transfers"]
        ]  # fmt: skip
        where = "NUMA node not told" if gpu.get("node") is None else f"on NUMA node {gpu['node']}"
        shared = f"; {gpu['unified']}" if gpu.get("unified") else ""
        grids.append(
            Grid(
                f"GPU {gpu['index']}: {gpu['name']}, {where}{shared}",
                ["Copy", "Host memory on", "Bytes", "Bandwidth", "Spread"],
                rows,
                2,
            )
        )
    lead = "Copies count the bytes that arrive; copies inside a GPU count those read and those written. Managed memory is read by the GPU after the host has written it."
    return Part("gpus", "GPUs and the host", lead, [], grids)


def _peers(found: Found) -> Part | None:
    pairs = found.rows("peers")
    if not pairs:
        return None
    gpus = sorted({one["source"] for one in pairs})
    cells = {(one["source"], one["target"]): one for one in pairs}
    grids = []
    for title, shown, name in (
        ("Copies between GPUs", _rate, "bytes_per_s"),
        ("Shortest copy between GPUs", _latency, "latency_s"),
    ):
        rows = [[f"GPU {a}", *(shown(cells[a, b][name]) if (a, b) in cells else "" for b in gpus)] for a in gpus]
        grids.append(Grid(title, ["From", *(f"to GPU {b}" for b in gpus)], rows))
    indirect = sorted({f"GPU {one['source']} to GPU {one['target']}" for one in pairs if not one["direct"]})
    lead = "One copy at a time, by the copy engines." + (
        f" Through the host: {', '.join(indirect)}." if indirect else " All pairs reach each other directly."
    )
    return Part("peers", "GPUs and each other", lead, [], grids)


def _roofline(found: Found) -> Part | None:
    if found.calibration is None or not roofs(found.calibration):
        return None
    tops, dots = roofs(found.calibration), points(found.calibration)
    chart = both(lambda width: charts.roofline(tops, dots, width), FULL)
    rows = [
        [roof.dtype, flat(roof.peak_flops_per_s, "FLOP/s"), rate_words(roof.bytes_per_s), units.three(roof.ridge)]
        for roof in tops
    ]
    grids = [Grid("Roofs", ["Dtype", "Best product", "Reading memory", "Ridge, FLOPs a byte"], rows)]
    rows = [
        [one.dtype, one.name, units.three(one.intensity), flat(one.flops_per_s, "FLOP/s"), f"{one.share:.0%}"]
        for one in sorted(dots, key=lambda one: (one.dtype, one.intensity))
    ]
    grids.append(
        Grid(f"{len(dots)} measured operations", ["Dtype", "Operation", "FLOPs a byte", "Rate", "Of the roof"], rows, 2)
    )
    best = max((one["bytes_per_s"] for one in found.rates("copies")[-1:]), default=None)
    moving = [
        [
            one["dtype"],
            one["kernel"].replace("_", " "),
            rate_words(one["bytes_per_s"]),
            f"{one['bytes_per_s'] / best:.0%}" if best else "",
        ]
        for one in found.rates("kernels")
    ]
    if moving:
        grids.append(
            Grid("Kernels that only move bytes", ["Dtype", "Kernel", "Bandwidth", "Of the largest copy"], moving, 2)
        )
    lead = (
        f"The rates of {found.calibration['device']} that estimates use: linears, their gradients and attention, against the best product and the bandwidth of memory. "
        "Left of the ridge memory is the limit, right of it arithmetic. A dot above the slope has its operands in a cache."
    )
    return Part("roofline", "Roofline", lead, [Panel("", chart)], grids)


def _machine(found: Found) -> Part:
    topology = found.probe["topology"]
    rows = [
        [
            f"node {node['id']}",
            spell(node["cpus"]) or "none",
            _size(node["memory_bytes"]) or "unknown",
            " ".join(map(str, node["distances"])),
        ]
        for node in topology["nodes"]
    ]
    grids = [Grid("NUMA nodes", ["Node", "Processors", "Memory", "Distances"], rows, 4)]
    one = topology["cpus"][:1]
    caches = [cache for cache in topology["caches"] if cache["cpus"][:1] == one or set(one) & set(cache["cpus"])]
    rows = [
        [f"L{cache['level']}", _size(cache["size_bytes"]), f"{cache['line_bytes']} B", spell(cache["cpus"])]
        for cache in caches
    ]
    if rows:
        grids.append(Grid(f"Caches of processor {one[0]}", ["Cache", "Size", "Line", "Shared by"], rows, 1))
    rows = [
        [one["kind"], one["address"], one["vendor"], "not told" if one["node"] is None else f"node {one['node']}"]
        for one in topology["devices"]
    ]
    if rows:
        grids.append(Grid("Devices on PCI Express", ["Kind", "Address", "Vendor", "NUMA node"], rows, 4))
    facts = [
        f"{count(len(topology['cores']), 'core')}, {count(len(topology['cpus']), 'logical processor')}, {count(len(topology['sockets']), 'socket')} that may be used",
        "no limit of processor time"
        if topology["quota"] is None
        else f"a limit of {topology['quota']:g} processors' time",
        "no limit of memory below the machine's"
        if topology["memory_limit_bytes"] is None
        else f"a limit of {_size(topology['memory_limit_bytes'])} of memory",
        f"clock governor: {topology['governor'] or 'not told'}",
    ]
    facts += [f"unified memory: {topology['unified']}"] if topology.get("unified") else []
    return Part("machine", "The machine", "As the kernel tells it to this process.", [], grids, facts)


def spell(cpus: Sequence[int]) -> str:
    """Numbers as ranges: '0-3, 8'."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _notes(found: Found) -> Part | None:
    notes = [
        *found.rows("notes"),
        *(
            f"{dtype} rates: measured while {why}"
            for dtype, why in ((found.calibration or {}).get("busy") or {}).items()
        ),
    ]
    return Part("notes", "What to keep in mind", "", list=[str(note) for note in notes]) if notes else None
