"""Kilowatt-hours, quality a kilowatt-hour and the ratio to the first run, from artifacts' figures alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hone.base.figure import Figure
from hone.report.collect import Line, Row
from hone.report.green import green
from hone.report.markdown import _green


def row(name: str, kind: str = "train", **figures: float | None) -> Row:
    made = {key: Figure(name=key, value=value, unit="") for key, value in figures.items()}
    return Row(f"{kind}-{name}", kind, name, "f", {}, made, [], {}, {}, 0)


def test_against_the_first_of_its_stage():
    rows = [
        row("base", energy_j=7.2e6, joules_per_token=2.0, val_loss=2.0),
        row("saver", energy_j=3.6e6, joules_per_token=1.0, val_loss=2.1),
        row("unmeasured", energy_j=None, val_loss=1.0),
        row("score", "eval", energy_j=3.6e5, accuracy=0.5),
    ]
    base, saver, score = green(Line("line", Path(), rows, []))
    assert (base.kwh, base.of_energy, base.quality) == (2.0, None, pytest.approx(math.exp(-2.0)))
    assert saver.of_energy == 0.5 and saver.of_quality == pytest.approx(math.exp(-0.1))
    assert saver.quality_per_kwh == pytest.approx(math.exp(-2.1)) and saver.token_j == 1.0
    assert score.quality_per_kwh == pytest.approx(5.0) and score.of_energy is None


def test_the_table_is_there_where_energy_was_measured():
    rows = [row("base", energy_j=7.2e6, val_loss=2.0), row("saver", energy_j=3.6e6, val_loss=2.1)]
    text = "\n".join(_green(Line("line", Path(), rows, [])))
    assert "| `train-saver` | 1 | - | 0.122 | 0.122 | 0.5 | 0.905 |" in text
    assert _green(Line("line", Path(), [row("base", energy_j=None, val_loss=2.0)], [])) == []
