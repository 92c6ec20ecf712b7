"""A figure: a number with its unit, how it was got, and what had been predicted for it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

How = Literal["measured", "modelled", "quoted"]


class Estimate(BaseModel):
    """What a figure should come to, said before the work is done.

    `bound` marks a speed-of-light limit (no calibration of this machine was at hand): the measurement may be
    far from it and it must be shown as a limit, not as a prediction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    unit: str
    formula: str = Field("", description="How the value came about, in words a reader can check.")
    bound: bool = False
    tolerance: float | None = Field(
        None, description="Largest relative error the estimate promises, if it promises any."
    )


class Figure(BaseModel):
    """One named number of an artifact. `value` is None when it could not be measured (no sensor), never 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float | None
    unit: str
    how: How = "measured"
    n: int = Field(1, description="Number of measurements behind the value.")
    spread: float | None = Field(None, description="Half the range of the measurements, in `unit`.")
    estimate: Estimate | None = None
    note: str = Field("", description="Conditions needed to read the number: window, join, why it is absent.")

    @property
    def error(self) -> float | None:
        """Relative error of the estimate, (estimate - value) / value; None without both."""
        if self.estimate is None or not self.value:
            return None
        return (self.estimate.value - self.value) / self.value


def human_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps it above 1: '3.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """`seconds` as a person says them: '0.4 s', '42 s', '6 min 5 s', '3 h 20 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
