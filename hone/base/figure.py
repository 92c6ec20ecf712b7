"""A figure: a number with its unit, how it was obtained, and its estimate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hone.base.errors import ArtifactError
from hone.base.interval import Interval

How = Literal["measured", "modelled", "quoted"]


class Estimate(BaseModel):
    """The expected value of a figure, computed before the work.

    `bound` marks a speed-of-light limit (without a calibration of this machine): the measurement may be
    far from it, and it must be shown as a limit, not as a prediction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    unit: str
    formula: str = Field("", description="How the value was computed, in words that a reader can check.")
    bound: bool = False
    tolerance: float | None = Field(None, description="Largest relative error of the estimate, if it has a bound.")


class Figure(BaseModel):
    """One named number of an artifact. `value` is None when it could not be measured (no sensor), never 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float | None
    unit: str
    how: How = "measured"
    n: int = Field(
        1, description="Number of measurements behind the value, tokens included, which depend on each other."
    )
    interval: Interval | None = Field(
        None, description="How far the value may be from the true mean: a half-width, its level, and of how many."
    )
    estimate: Estimate | None = None
    note: str = Field("", description="Conditions of the measurement, or why the value is absent.")

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_manifests(cls, row: Any) -> Any:
        """Manifests had `ci95`, half of a 95 % interval, before they had its level and number of observations."""
        if not isinstance(row, dict) or "ci95" not in row:
            return row
        rest = {name: value for name, value in row.items() if name != "ci95"}
        return rest if row["ci95"] is None else {**rest, "interval": {"half_width": row["ci95"], "level": 0.95}}

    @property
    def half_width(self) -> float | None:
        """Half of the interval, in `unit`; None without one."""
        return None if self.interval is None else self.interval.half_width

    @property
    def error(self) -> float | None:
        """Relative error of the estimate, (estimate - value) / value; None without both."""
        if self.estimate is None or not self.value:
            return None
        return (self.estimate.value - self.value) / self.value


def read_figures(rows: Iterable[dict[str, Any]], source: Path) -> dict[str, Figure]:
    """The figures `rows` of the manifest `source`, by name. Raises ArtifactError for one that has other fields."""
    found: dict[str, Figure] = {}
    for row in rows:
        try:
            found[row["name"]] = Figure.model_validate(row)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ArtifactError(
                f"{source}: field {'.'.join(map(str, wrong['loc']))} of the figure {row['name']}: {wrong['msg']}",
                fix="make the artifact again with --redo: an earlier hone wrote it, or it was changed since",
            ) from None
    return found


def human_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps it above 1: '3.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


_UNITS = {
    "": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_AMOUNT = re.compile(r"(\d+\.?\d*(?:e\d+)?) ?(%|[KMGT]i?B|B|)")


def byte_count(text: str, total: float = 0.0) -> int:
    """The bytes that `text` names: '20GiB', '20 GB', '500000000', '80%' (of `total`). Raises ValueError for another text or none."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"'{text}' is no amount of memory: write 20GiB, 20GB, 80% or a number of bytes")
    number, unit = float(found[1]), found[2].removesuffix("B") if found[2] == "B" else found[2]
    return int(number / 100 * total) if unit == "%" else int(number * _UNITS[unit])


def human_seconds(seconds: float) -> str:
    """`seconds` in the units of speech: '0.4 s', '42 s', '6 min 5 s', '3 h 20 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
