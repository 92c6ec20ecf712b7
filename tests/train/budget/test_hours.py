"""Schedule files: which hours they allow, when the next ones are, and what is said of wrong ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hone.base.errors import SpecError
from hone.train.budget.hours import read_hours, until_open


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def written(folder: Path, text: str, name: str = "hours.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_windows_over_midnight_and_on_days(tmp_path):
    hours = read_hours(written(tmp_path, "allowed: [22:00-06:00, sat-sun 00:00-24:00]"))
    # 2026-11-27 is a Friday.
    for text, wanted in (
        ("2026-11-27 05:59", True), ("2026-11-27 06:00", False), ("2026-11-27 21:59", False), ("2026-11-27 22:00", True),
        ("2026-11-28 12:00", True), ("2026-11-29 23:59", True), ("2026-11-30 12:00", False),
    ):  # fmt: skip
        assert hours.open_at(at(text)) is wanted, text
    assert until_open(hours, at("2026-11-27 21:00")) == 3600 and until_open(hours, at("2026-11-27 23:00")) == 0.0


def test_a_night_that_begins_on_friday_goes_on_on_saturday_alone(tmp_path):
    hours = read_hours(written(tmp_path, "allowed: fri 22:00-06:00"))
    assert hours.open_at(at("2026-11-28 05:00")) and not hours.open_at(at("2026-11-27 05:00"))
    assert until_open(hours, at("2026-11-28 06:00")) == timedelta(days=6, hours=16).total_seconds()


def test_every_minute_of_two_weeks_agrees_with_counting(tmp_path):
    """The next opening is the first open minute."""
    hours = read_hours(written(tmp_path, "allowed: [tue-thu 01:30-04:15, sun-mon 23:00-01:00]"))
    begin = at("2026-11-27 00:00")
    minutes = [begin + timedelta(minutes=number) for number in range(0, 14 * 1440, 15)]
    is_open = [hours.open_at(one) for one in minutes]
    assert 0 < sum(is_open) < len(is_open) / 3
    for number in range(0, 7 * 96, 5):
        first = next(later for later in range(number, len(minutes)) if is_open[later])
        assert until_open(hours, minutes[number]) == (minutes[first] - minutes[number]).total_seconds()


def test_the_time_zone_and_its_summer(tmp_path):
    hours = read_hours(written(tmp_path, "timezone: Europe/Berlin\nallowed: 22:00-23:00"))
    assert hours.open_at(at("2026-01-10 21:30")) and not hours.open_at(at("2026-01-10 20:30"))
    assert hours.open_at(at("2026-07-10 20:30")) and not hours.open_at(at("2026-07-10 21:30"))


def test_hours_of_a_price(tmp_path):
    text = f"threshold: 0.2\nunit: EUR/kWh\nhours: {[0.1] * 6 + [0.4] * 16 + [0.2, 0.2]}"
    path = written(tmp_path, text)
    assert until_open(read_hours(path), at("2026-11-27 10:30")) == 11.5 * 3600
    assert read_hours(path, threshold=0.1).open_at(at("2026-11-27 03:00"))
    assert not read_hours(path, threshold=0.1).open_at(at("2026-11-27 23:00"))


def test_a_trace_of_intensities(tmp_path):
    rows = "Time,Carbon Intensity\n2026-11-27 00:00:00,300\n2026-11-27 00:30:00,150\n2026-11-27 01:00:00,310\n2026-11-27 01:30:00,90\n"
    hours = read_hours(written(tmp_path, rows, "trace.csv"), threshold=200.0)
    assert until_open(hours, at("2026-11-27 00:10")) == 20 * 60
    assert hours.open_at(at("2026-11-27 01:59")) and until_open(hours, at("2026-11-27 02:00")) is None
    dated = read_hours(written(tmp_path, "start,end\n2026-11-28T01:00+01:00,2026-11-28T03:00+01:00\n", "windows.csv"))
    assert hours.open_at(at("2026-11-27 00:45")) and dated.open_at(at("2026-11-28 00:00"))


@pytest.mark.parametrize(
    ("text", "name", "threshold", "said"),
    [
        ("allowed: []", "a.yaml", None, "allows no hour"),
        ("allowed: night", "a.yaml", None, "'night' is no window of a day"),
        ("allowed: [08:00-08:00]", "a.yaml", None, "'08:00-08:00' ends when it starts"),
        ("allowed: 25:00-26:00", "a.yaml", None, "no such hour"),
        ("allowed: nox 01:00-02:00", "a.yaml", None, "'nox' is no day"),
        ("open: 01:00-02:00", "a.yaml", None, "neither 'allowed' nor 'hours'"),
        ("allowed: 01:00-02:00\nuntil: 3", "a.yaml", None, "unknown field 'until'"),
        ("timezone: Mars/Olympus\nallowed: 01:00-02:00", "a.yaml", None, "unknown time zone"),
        ("hours: [1, 2]\nthreshold: 1", "a.yaml", None, "must be 24 numbers"),
        (f"hours: {[1] * 24}", "a.yaml", None, "no threshold says"),
        (f"hours: {[5] * 24}\nthreshold: 1", "a.yaml", None, "the least is 5"),
        ("allowed: 01:00-02:00", "a.yaml", 3.0, "names the hours itself"),
        ("a,b\n1,2", "a.csv", None, "other columns"),
        ("start,end\n2026-01-02,2026-01-01", "a.csv", None, "line 2: the window ends before it starts"),
        ("time,v\nnow,1\n", "a.csv", 1.0, "line 2: 'now' is no time"),
        ("time,v\n2026-01-01,x\n2026-01-02,1\n", "a.csv", 1.0, "line 2: no number"),
        ("time,v\n2026-01-02,1\n2026-01-01,1\n", "a.csv", 1.0, "do not rise"),
    ],
)
def test_wrong_files_are_named(text, name, threshold, said, tmp_path):
    with pytest.raises(SpecError, match=said):
        read_hours(written(tmp_path, text, name), threshold)


def test_a_missing_file(tmp_path):
    for name in ("none.yaml", "none.csv"):
        with pytest.raises(SpecError, match="none"):
            read_hours(tmp_path / name)


def test_a_csv_with_a_byte_order_mark_is_read_and_one_column_is_named(tmp_path):
    marked = tmp_path / "marked.csv"
    marked.write_text("start,end\n2026-01-01T00:00,2026-01-01T01:00\n", encoding="utf-8-sig")
    assert read_hours(marked).open_at(at("2026-01-01T00:30"))
    with pytest.raises(SpecError, match="line 2: it has one column"):
        read_hours(written(tmp_path, "start,end\n2026-01-01T00:00\n", "short.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="no text in UTF-8"):
        read_hours(tmp_path / "bytes.csv")
    with pytest.raises(SpecError, match=r"early_stopping\.energy\.threshold") as caught:
        read_hours(written(tmp_path, "time,value\n2026-01-01T00:00,1\n2026-01-01T01:00,2\n", "prices.csv"))
    assert "--early_stopping.energy.threshold=VALUE" in str(caught.value)
