"""Files of carbon intensities: Electricity Maps' and WattTime's JSON, and tables of times and values."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.errors import SpecError
from hone.cost.carbon.intensity import Intensity, Signal

G_PER_KWH_OF_LB_PER_MWH = 0.45359237
"""1 lb is 453.59237 g by definition, and 1 MWh 1000 kWh."""


def read_intensity(path: Path, site: str = "") -> Intensity:
    """The intensities in `path`, by what the file is; `site` names it where the file does not.

    JSON of Electricity Maps (`/carbon-intensity/history` or `/forecast`: averages) or of WattTime v3 (`/historical` or
    `/forecast` of `co2_moer`: marginal, from lb/MWh); else CSV whose first column is the time and whose second is g CO2e/kWh,
    with the signal named in its header: `time,average` or `time,marginal`. Times without a zone are UTC. SpecError: another
    form, steps that are uneven or missing, or a value that is no number.
    """
    try:
        text = path.read_text(encoding="utf8")
    except FileNotFoundError:
        raise SpecError(f"no file {path} of carbon intensities", fix="check the path") from None
    if not text.lstrip().startswith(("{", "[")):
        return _table(text, path, site)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{path} is no JSON: {error}", fix="save the answer of the service as it came") from None
    if isinstance(values, dict) and isinstance(values.get("data"), list) and isinstance(values.get("meta"), dict):
        return _watttime(values, path, site)
    rows = isinstance(values, dict) and next(
        (values[key] for key in ("history", "forecast", "data") if key in values), None
    )
    if rows and isinstance(rows, list):
        return _electricity_maps(values, rows, path, site)
    raise SpecError(
        f"{path} is neither Electricity Maps' nor WattTime's JSON",
        fix="it needs `history` or `forecast` with `datetime` and `carbonIntensity`, or `meta` and `data` with `point_time` and `value`",
    )


def _electricity_maps(whole: dict[str, Any], rows: list[Any], path: Path, site: str) -> Intensity:
    """Averages of Electricity Maps: direct or of the life cycle, as each row's emissionFactorType says."""
    unit = whole.get("unit", whole.get("units", "gCO2eq/kWh"))
    if "/kWh" not in str(unit).replace(" ", ""):
        raise SpecError(f"{path} has the unit {unit!r}", fix="give carbon intensities in gCO2eq/kWh")
    bases = {str(row.get("emissionFactorType", whole.get("emissionFactorType", "unknown"))) for row in rows}
    if len(bases) > 1:
        raise SpecError(
            f"{path} mixes emission factors: {', '.join(sorted(bases))}",
            fix="ask the service for one emissionFactorType",
        )
    name = site or str(whole.get("zone", rows[0].get("zone", path.stem)))
    return _even(_pairs(rows, "datetime", "carbonIntensity", path), 1.0, name, "average", f"Electricity Maps, {path.name}", bases.pop(), path)  # fmt: skip


def _watttime(whole: dict[str, Any], path: Path, site: str) -> Intensity:
    """Marginal operating emissions rates of WattTime."""
    meta = whole["meta"]
    signal, unit = str(meta.get("signal_type", "")), str(meta.get("units", ""))
    if signal != "co2_moer":
        raise SpecError(f"{path} has the signal {signal!r}", fix="ask WattTime for signal_type=co2_moer")
    if unit != "lbs_co2_per_mwh":
        raise SpecError(
            f"{path} has the unit {unit!r}", fix="WattTime's co2_moer is in lbs_co2_per_mwh; save the answer as it came"
        )
    name = site or str(meta.get("region", path.stem))
    pairs = _pairs(whole["data"], "point_time", "value", path)
    return _even(pairs, G_PER_KWH_OF_LB_PER_MWH, name, "marginal", f"WattTime, {path.name}", "direct", path)


def _table(text: str, path: Path, site: str) -> Intensity:
    """A CSV of times and g CO2e/kWh whose header names the signal."""
    rows = [row for row in csv.reader(text.splitlines()) if row and not row[0].startswith("#")]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if len(header) != 2 or header[1] not in ("average", "marginal"):
        raise SpecError(
            f"{path} does not say what its intensities are: its header is {','.join(header)!r}",
            fix="begin the file with `time,average` (of the mix) or `time,marginal` (of the next kWh), in g CO2e/kWh",
        )
    pairs = _pairs([dict(zip(("time", "value"), row)) for row in rows[1:]], "time", "value", path)
    signal: Signal = "average" if header[1] == "average" else "marginal"
    return _even(pairs, 1.0, site or path.stem, signal, path.name, "unknown", path)


def _pairs(rows: Iterable[Any], time: str, value: str, path: Path) -> list[tuple[datetime, float]]:
    found = []
    for number, row in enumerate(rows, 1):
        try:
            at = datetime.fromisoformat(str(row[time]).strip())
            found.append((at if at.tzinfo else at.replace(tzinfo=UTC), float(row[value])))
        except (KeyError, TypeError, ValueError):
            raise SpecError(
                f"{path}: row {number} has no time in '{time}' or no number in '{value}': {row!r}",
                fix="leave out no value: ask the service for hours that it has, or fill the gap and say so",
            ) from None
    return sorted(found)


def _even(
    pairs: list[tuple[datetime, float]], scale: float, site: str, signal: Signal, source: str, basis: str, path: Path
) -> Intensity:
    """The trace of `pairs`, whose steps must be equal: a gap would shift every later hour."""
    if len(pairs) < 2:
        raise SpecError(f"{path} has {len(pairs)} intensities", fix="give two or more, from which the step is read")
    times = np.array([at.timestamp() for at, _ in pairs])
    steps = np.diff(times)
    if (steps != steps[0]).any() or steps[0] <= 0:
        wrong = int(np.argmax(steps != steps[0]))
        raise SpecError(
            f"{path}: after {pairs[wrong][0]:%Y-%m-%d %H:%M} comes {pairs[wrong + 1][0]:%Y-%m-%d %H:%M}, and steps before are of "
            f"{steps[0] / 60:g} minutes",
            fix="give a trace of equal steps without gaps",
        )
    values = np.array([value for _, value in pairs]) * scale
    if not np.isfinite(values).all() or (signal == "average" and (values < 0).any()):
        raise SpecError(f"{path} has an intensity that is negative or no number", fix="correct the trace")
    return Intensity(site, pairs[0][0].astimezone(UTC), float(steps[0]), values, signal, source, basis)
