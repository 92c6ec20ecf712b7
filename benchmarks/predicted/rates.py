"""Rates of a row's machine: of its data sheet, of the calibration that its call recorded, or of the ledger's rows of that kind of GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ledger import FOLDER
from hone.cost.roofline import data_sheets
from hone.measure.calibration import Calibration
from hone.measure.machine import Gpu, Machine
from hone.plan.search.machines import assumed
from tests.cost.h100 import h100
from tests.cost.h200 import h200

CALIBRATIONS = FOLDER / "calibrations"
SHEET_PART = 0.8
"""Part of a data sheet's rates that a plan of a machine elsewhere takes where its goal says `utilization: 0.8`."""

GPUS: dict[str, Gpu] = {one.gpus[0].name: one.gpus[0] for one in (h100(), h200())}


class Rates(NamedTuple):
    """A machine with rates, and what they are."""

    machine: Machine
    fresh: bool
    """Whether they were measured in the row's own call."""
    what: str


@cache
def kept(name: str) -> Calibration:
    """A calibration of the ledger by its ID."""
    return Calibration.model_validate_json((CALIBRATIONS / f"{name}.json").read_text(encoding="utf8"))


@cache
def stored() -> dict[str, dict[str, str]]:
    """What `index.json` says of each stored calibration: when, on which GPU, on how many."""
    path = CALIBRATIONS / "index.json"
    return json.loads(path.read_text(encoding="utf8")) if path.exists() else {}


def gpu_of(row: dict[str, Any]) -> str:
    """The name of a row's GPU; "" for a CPU."""
    machine = row["machine"]
    if not str(machine.get("device", "cpu")).startswith("cuda") or not machine.get("gpus"):
        return ""
    return str(machine["gpus"][0]["name"])


def machine_of(row: dict[str, Any], calibration: Calibration | None) -> Machine:
    """The machine of a row with these rates; what an old row does not say of its GPU is as others of that name have it."""
    told = row["machine"]
    gpu = GPUS.get(gpu_of(row)) or Gpu.model_validate(told["gpus"][0])
    count = max(told.get("num_ranks") or 1, 1)
    return Machine(
        cpu=told.get("cpu") or "unknown", num_cores=told.get("num_cores") or 16, num_threads=told.get("num_threads") or 16,
        ram_bytes=told.get("ram_bytes") or 1 << 37, gpus=(gpu,) * count, os="Linux", python="", torch=told.get("torch"),
        device="cuda", num_ranks=count, planned=True, calibration=calibration,
    )  # fmt: skip


def of_sheet(row: dict[str, Any]) -> Rates | None:
    """A part of the data sheet; None for a GPU that the catalogue lacks."""
    sheet = next((one for one in data_sheets() if one["match"] in gpu_of(row)), None)
    if sheet is None:
        return None
    return Rates(machine_of(row, assumed(sheet, SHEET_PART)), False, f"{SHEET_PART:.0%} of the data sheet")


def measured(row: dict[str, Any]) -> Rates | None:
    """Those that the row's call recorded; else the newest stored ones of such a GPU, best of as many; else those of the ledger's own rows,
    which are of H100s and H200s: None for another GPU."""
    name = row.get("calibration")
    if name:
        return Rates(machine_of(row, kept(name)), True, f"calibration {name}")
    ranks = max(row["machine"].get("num_ranks") or 1, 1)
    same = [
        (int(at["ranks"]) >= ranks, at["time"], one) for one, at in stored().items() if at["processor"] == gpu_of(row)
    ]
    if "H200" not in gpu_of(row):  # of H100s the ledger's rows have collectives, too
        same = [one for one in same if one[0]]
    if same:
        name = max(same)[2]
        return Rates(machine_of(row, kept(name)), False, f"calibration {name}, of another day")
    if gpu_of(row) not in GPUS:
        return None
    one = h200() if "H200" in gpu_of(row) else h100(ranks)
    return Rates(machine_of(row, one.calibration), False, "rows of the ledger")


def store(source: Path, row: dict[str, Any]) -> str:
    """Copies a calibration into the ledger, with when and where `row` says that it was measured. Returns its ID."""
    name = source.stem.removeprefix("calibration-")
    Calibration.model_validate_json(source.read_text(encoding="utf8"))
    CALIBRATIONS.mkdir(exist_ok=True)
    (CALIBRATIONS / f"{name}.json").write_text(source.read_text(encoding="utf8"), encoding="utf8")
    index = dict(stored())
    processor = gpu_of(row) or str(row["machine"]["cpu"])
    index[name] = {"time": row["time"], "processor": processor, "ranks": str(row["machine"].get("num_ranks", 1))}
    (CALIBRATIONS / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf8")
    stored.cache_clear()
    return name
