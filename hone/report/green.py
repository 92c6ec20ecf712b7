"""What a line's trainings and serving gave for their energy: kilowatt-hours, joules a token, quality a kilowatt-hour, against the first."""

from __future__ import annotations

import math
from typing import NamedTuple

from hone.report.collect import Line, Row

JOULES = 3.6e6
"""Of a kilowatt-hour."""


class Green(NamedTuple):
    """One artifact with measured energy. None: not known of it, or of the first of its stage, which is the baseline."""

    row: Row
    kwh: float
    token_j: float | None
    quality: float | None
    """Probability that the model gives the right token, the geometric mean over the val split: exp(-val_loss). An evaluation's accuracy."""
    of_energy: float | None
    """Energy over that of the baseline."""
    of_quality: float | None

    @property
    def quality_per_kwh(self) -> float | None:
        """Quality a kilowatt-hour."""
        return None if self.quality is None else self.quality / self.kwh


def green(line: Line) -> list[Green]:
    """The artifacts whose energy was measured, by stage in the line's order; those of a stage are compared with its first."""
    found: list[Green] = []
    for kind in ("train", "compress", "eval", "serve"):
        rows = [row for row in line.of(kind) if row.value("energy_j")]
        for row in rows:
            base, quality = rows[0], _quality(row)
            first, energy = _quality(base), row.value("energy_j") or 0.0
            alone = row is base
            ratio = None if alone else energy / (base.value("energy_j") or math.nan)
            better = None if alone or not first or quality is None else quality / first
            found.append(Green(row, energy / JOULES, row.value("joules_per_token"), quality, ratio, better))
    return found


def _quality(row: Row) -> float | None:
    accuracy, loss = row.value("accuracy"), row.value("val_loss") if row.kind == "train" else row.value("loss")
    if accuracy is not None:
        return accuracy
    return math.exp(-loss) if loss is not None else None
