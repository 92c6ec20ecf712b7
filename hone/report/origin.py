"""The origin of the figures: machines, versions and commits, in words."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from hone.report import units
from hone.report.collect import Line, mappings


class Origin(NamedTuple):
    """A machine or a set of versions: its title names the artifacts made there where there are several."""

    title: str
    details: list[tuple[str, str]]
    """(name, words)."""


def summary(line: Line) -> str:
    """The line below the title: number of artifacts, machine, duration, date."""
    words = [f"{len(line.rows)} artifact{'s' if len(line.rows) != 1 else ''}"]
    times = [value for row in line.rows if (value := row.value("time_s")) is not None]
    if times:
        words.append(f"{units.seconds(sum(times))} of work")
    peaks = [value for row in line.rows if (value := row.value("peak_memory_bytes")) is not None]
    if peaks:
        words.append(f"at most {units.show_bytes(max(peaks))} of memory")
    processors = sorted({str(row.machine["cpu"]) for row in line.rows if row.machine.get("cpu")})
    if processors:
        words.append(f"on {' and '.join(processors)}")
    made = max((str(row.provenance.get("time") or "") for row in line.rows), default="")
    return ", ".join(words) + (f"; finished {made[:10]} {made[11:16]} UTC" if len(made) >= 16 else "") + "."


def machines(line: Line) -> list[Origin]:
    """One entry per distinct machine, then one per distinct set of versions, with the artifacts made there."""
    found = []
    for title, key, words in (("Machine", "machine", machine_details), ("Versions", "provenance", version_details)):
        groups: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
        for row in line.rows:
            details = words(getattr(row, key))
            groups.setdefault(json.dumps(details), (details, []))[1].append(row.id)
        for details, ids in groups.values():
            of = (
                ""
                if len(groups) == 1
                else f" of {', '.join(ids) if len(ids) <= 4 else f'{ids[0]} and {len(ids) - 1} more'}"
            )
            found.append(Origin(title + of, details or [("", "not described")]))
    return found


def machine_details(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """A machine's description in words; nested descriptions are flattened."""
    details = []
    for key, value in machine.items():
        if key.endswith("_bytes") and isinstance(value, int | float):
            details.append((key.removesuffix("_bytes").replace("ram", "memory"), units.show_bytes(value)))
        elif key == "calibration":
            details += (
                calibration_details(value) if isinstance(value, dict) and value else [(key, "none: times are limits")]
            )
        elif isinstance(value, list):
            shown = [str(entry.get("name", entry)) if isinstance(entry, dict) else str(entry) for entry in value]
            details.append((key, ", ".join(shown) or "none"))
        elif value is not None and not isinstance(value, dict):
            details.append((key.replace("num_", "").replace("_", " "), str(value)))
    return details


def version_details(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """hone, commit and packages, without the time and the command, which belong to single artifacts."""
    commit = provenance.get("commit")
    details = [("hone", str(provenance.get("hone", "unknown")))]
    details.append(
        ("commit", f"{commit}{' with uncommitted changes' if provenance.get('dirty') else ''}" if commit else "unknown")
    )
    packages = provenance.get("packages")
    return details + [
        (str(name), str(version or "absent"))
        for name, version in (packages.items() if isinstance(packages, dict) else ())
    ]


def calibration_details(calibration: dict[str, Any]) -> list[tuple[str, str]]:
    """The measured rates of a machine: memory, the best matmul per dtype, the overhead of an operation."""
    details = []
    read, op = calibration.get("read_bytes_per_s"), calibration.get("op_s")
    if isinstance(read, int | float):
        details.append(("memory read", f"{units.prefixed(read)}B/s"))
    best: dict[str, float] = {}
    for rate in mappings(calibration.get("matmuls")):
        if isinstance(rate.get("flops_per_s"), int | float):
            best[str(rate.get("dtype"))] = max(best.get(str(rate.get("dtype")), 0.0), float(rate["flops_per_s"]))
    details += [(f"best matmul, {dtype}", f"{units.prefixed(rate)}FLOP/s") for dtype, rate in best.items()]
    if isinstance(op, int | float):
        details.append(("start of an operation", units.seconds(op)))
    return details
