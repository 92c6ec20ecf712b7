"""Carbon intensities: the shipped year, published statistics of it, forecasts, and files of services."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import SpecError
from hone.cost.carbon.intensity import Intensity, forecast, same_signal, shipped
from hone.cost.carbon.readers import read_intensity

NEW_YEAR = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("site", "mean", "spread"), [("DE", 313.4, 110.5), ("GB", 212.9, 65.0), ("FR", 56.3, 19.1)])
def test_a_year_has_the_means_of_its_source(site: str, mean: float, spread: float):
    """GB's rows are quarter hours from May on, so that its mean of rows, 214.8, is above that of its hours."""
    year = shipped(site)
    assert len(year.values) == 366 * 48 and year.signal == "average" and year.basis == "lifecycle"
    assert year.mean() == pytest.approx(mean, abs=0.1)
    assert year.over(NEW_YEAR, 3600, 8784).std() == pytest.approx(spread, abs=0.2)


def test_means_over_other_steps_keep_the_sum():
    trace = Intensity("X", NEW_YEAR, 1800.0, np.arange(48.0), "average", "made")
    assert trace.over(NEW_YEAR, 3600, 24).tolist() == [0.5 + 2 * hour for hour in range(24)]
    assert trace.over(NEW_YEAR, 600, 6).tolist() == pytest.approx([0, 0, 0, 1, 1, 1])
    with pytest.raises(SpecError, match="the trace has 2020-01-01 00:00 to 2020-01-02 00:00"):
        trace.over(NEW_YEAR, 3600, 25)


def test_forecasts_use_nothing_that_is_later():
    truth = shipped("DE")
    now = NEW_YEAR + timedelta(days=10, hours=5)
    known = 10 * 48 + 10
    changed = Intensity("DE", truth.start, truth.step_s, truth.values.copy(), "average", "made")
    changed.values[known:] += 1000.0
    for how in ("yesterday", "last_week"):
        seen = forecast(truth, now, how)
        assert (seen.values == forecast(changed, now, how).values)[known : known + 96].all()
        assert (seen.values[:known] == truth.values[:known]).all()
    day = forecast(truth, now, "yesterday").values
    assert (day[known : known + 48] == truth.values[known - 48 : known]).all()
    assert (day[known + 48 : known + 96] == truth.values[known - 48 : known]).all()
    errors = (forecast(truth, now, "noise:0.05").values - truth.values)[known:]
    assert errors.std() == pytest.approx(0.05 * truth.mean(), rel=0.05)
    with pytest.raises(SpecError, match="no forecast 'tomorrow'"):
        forecast(truth, now, "tomorrow")
    with pytest.raises(SpecError, match="needs intensities of 168 hours"):
        forecast(truth, NEW_YEAR + timedelta(days=2), "last_week")


def _rows(count: int, time: str, value: str, **more: object) -> list[dict[str, object]]:
    return [{time: f"2024-05-01T{hour:02}:00:00.000Z", value: 100 + hour, **more} for hour in range(count)]


def test_electricity_maps_is_read(tmp_path: Path):
    path = tmp_path / "history.json"
    rows = _rows(24, "datetime", "carbonIntensity", zone="DE", emissionFactorType="lifecycle", isEstimated=False)
    path.write_text(json.dumps({"zone": "DE", "history": rows}))
    trace = read_intensity(path)
    assert (trace.site, trace.signal, trace.basis, trace.step_s) == ("DE", "average", "lifecycle", 3600.0)
    assert trace.values.tolist() == [100.0 + hour for hour in range(24)] and trace.start == datetime(
        2024, 5, 1, tzinfo=UTC
    )
    path.write_text(json.dumps({"zone": "DE", "forecast": _rows(5, "datetime", "carbonIntensity")}))
    assert len(read_intensity(path).values) == 5
    rows[3]["emissionFactorType"] = "direct"
    path.write_text(json.dumps({"zone": "DE", "history": rows}))
    with pytest.raises(SpecError, match="mixes emission factors: direct, lifecycle"):
        read_intensity(path)


def test_watttime_is_marginal_and_in_pounds(tmp_path: Path):
    path = tmp_path / "moer.json"
    meta = {"region": "CAISO_NORTH", "signal_type": "co2_moer", "units": "lbs_co2_per_mwh"}
    path.write_text(json.dumps({"meta": meta, "data": _rows(6, "point_time", "value")}))
    trace = read_intensity(path)
    assert (trace.site, trace.signal) == ("CAISO_NORTH", "marginal")
    assert trace.values[0] == pytest.approx(100 * 0.45359237)  # 100 lb/MWh = 45.4 g/kWh
    with pytest.raises(SpecError) as error:
        same_signal([shipped("DE"), trace])
    assert "DE has average" in error.value.what and "CAISO_NORTH marginal" in error.value.what
    path.write_text(
        json.dumps({"meta": {**meta, "signal_type": "health_damage"}, "data": _rows(6, "point_time", "value")})
    )
    with pytest.raises(SpecError, match="health_damage"):
        read_intensity(path)


def test_tables_say_their_signal_and_have_no_gaps(tmp_path: Path):
    path = tmp_path / "SE.csv"
    path.write_text("time,average\n2024-05-01T00:00,20\n2024-05-01T01:00,30\n2024-05-01T02:00,25\n")
    assert read_intensity(path).site == "SE" and read_intensity(path).values.tolist() == [20.0, 30.0, 25.0]
    path.write_text("time,g\n2024-05-01T00:00,20\n")
    with pytest.raises(SpecError, match="does not say what its intensities are"):
        read_intensity(path)
    path.write_text("time,average\n2024-05-01T00:00,20\n2024-05-01T01:00,30\n2024-05-01T03:00,25\n")
    with pytest.raises(SpecError, match="after 2024-05-01 01:00 comes 2024-05-01 03:00"):
        read_intensity(path)
    path.write_text("time,marginal\n2024-05-01T00:00,20\n2024-05-01T01:00,\n")
    with pytest.raises(SpecError, match="row 2 has no time in 'time' or no number"):
        read_intensity(path)
