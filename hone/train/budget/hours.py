"""The hours in which a training may run, from a file: windows of a day, dated windows, or a price or carbon intensity by the hour."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta, tzinfo
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hone.base.errors import SpecError
from hone.base.spec import read_yaml

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))? )?(\d{1,2}):(\d\d) ?- ?(\d{1,2}):(\d\d)")
_FORMS = (
    "write YAML with `allowed: [22:00-06:00, sat-sun 00:00-24:00]`, or with `hours:` (24 values of a day) and `threshold:`; or a "
    "CSV with the columns start,end, or time,value and --early_stopping.energy.threshold"
)


class Hours(Protocol):
    """When a training may run."""

    def open_at(self, when: datetime) -> bool:
        """Whether it may run at `when` (with a time zone)."""
        ...

    def next_change(self, when: datetime) -> datetime | None:
        """The first moment after `when` at which that may change; None: never."""
        ...


def until_open(hours: Hours, when: datetime) -> float | None:
    """Seconds from `when` until it may run; 0.0 now, None never."""
    at: datetime | None = when
    for _ in range(100_000):
        if at is None:
            return None
        if hours.open_at(at):
            return (at - when).total_seconds()
        at = hours.next_change(at)
    return None


class Daily(NamedTuple):
    """Windows of every week: (first day, last day, start, end) in minutes from midnight; one that ends before it starts goes on after midnight."""

    windows: tuple[tuple[int, int, int, int], ...]
    zone: tzinfo

    def open_at(self, when: datetime) -> bool:
        local = when.astimezone(self.zone)
        minute = local.hour * 60 + local.minute
        for first, last, start, end in self.windows:
            today, before = (_within(first, last, (local.weekday() - back) % 7) for back in (0, 1))
            if (
                (today and start <= minute < end)
                or (end <= start and today and minute >= start)
                or (end <= start and before and minute < end)
            ):
                return True
        return False

    def next_change(self, when: datetime) -> datetime | None:
        local = when.astimezone(self.zone)
        marks = sorted({0, *(minute % 1440 for _, _, start, end in self.windows for minute in (start, end))})
        for day in range(9):
            date = local.date() + timedelta(days=day)
            for mark in marks:
                at = datetime.combine(date, time(mark // 60, mark % 60), self.zone).astimezone(UTC)
                if at > when:
                    return at
        return None


def _within(first: int, last: int, day: int) -> bool:
    return first <= day <= last if first <= last else day >= first or day <= last


class Dated(NamedTuple):
    """Windows with a date: (start, end) in order of time."""

    windows: tuple[tuple[datetime, datetime], ...]

    def open_at(self, when: datetime) -> bool:
        return any(start <= when < end for start, end in self.windows)

    def next_change(self, when: datetime) -> datetime | None:
        return min((at for window in self.windows for at in window if at > when), default=None)


def read_hours(path: Path, threshold: float | None = None) -> Hours:
    """The hours of a schedule file. Of a price or intensity, those at most `threshold`.

    YAML: `timezone` (UTC without it) and `allowed`, a list of windows HH:MM-HH:MM, each with a day or days before it; or `hours`, 24
    values by the hour of the day, and `threshold`. CSV: `start,end`, or `time,` and a value that holds until the next row; times in ISO
    8601, of UTC where they name no zone. Raises SpecError, with the line, for a file of another form, a missing or a useless threshold.
    """
    if path.suffix.lower() == ".csv":
        return _read_csv(path, threshold)
    values = read_yaml(path)
    if not isinstance(values, dict) or not {"allowed", "hours"} & set(values):
        raise SpecError(f"{path} has neither 'allowed' nor 'hours'", fix=_FORMS)
    unknown = set(values) - {"allowed", "hours", "threshold", "timezone", "unit"}
    if unknown:
        raise SpecError(f"{path} has an unknown field '{min(unknown)}'", fix=_FORMS)
    zone = _zone(str(values.get("timezone", "UTC")), path)
    if "allowed" in values:
        if threshold is not None:
            raise SpecError(
                f"{path} names the hours itself, without values", fix="leave --early_stopping.energy.threshold out"
            )
        listed = values["allowed"] if isinstance(values["allowed"], list) else [values["allowed"]]
        found = Daily(tuple(_window(one, path) for one in listed), zone)
    else:
        found = Daily(_cheap(values["hours"], values.get("threshold") if threshold is None else threshold, path), zone)
    if not found.windows:
        raise SpecError(f"{path} allows no hour", fix=_FORMS)
    return found


def _window(text: Any, path: Path) -> tuple[int, int, int, int]:
    match = _WINDOW.fullmatch(str(text).strip().lower())
    if match is None:
        raise SpecError(f"{path}: '{text}' is no window of a day", fix=_FORMS)
    first, last, *clock = match.groups()
    for day in (first, last):
        if day is not None and day not in _DAYS:
            raise SpecError(f"{path}: '{day}' is no day", fix=f"the days are {', '.join(_DAYS)}")
    begin, end = (int(hour) * 60 + int(minute) for hour, minute in (clock[:2], clock[2:]))
    if begin >= 1440 or end > 1440 or int(clock[1]) > 59 or int(clock[3]) > 59:
        raise SpecError(f"{path}: '{text}' has no such hour", fix="hours are 00:00 to 24:00")
    if begin == end:
        raise SpecError(
            f"{path}: '{text}' ends when it starts, which may mean the whole day or no hour",
            fix="write 00:00-24:00 for the whole day, or leave the window out",
        )
    days = (0, 6) if first is None else (_DAYS.index(first), _DAYS.index(last or first))
    return (*days, begin, end)


def _cheap(values: Any, threshold: Any, path: Path) -> tuple[tuple[int, int, int, int], ...]:
    """Windows of the hours whose value is at most the threshold."""
    numbers = values if isinstance(values, list) else []
    if len(numbers) != 24 or not all(isinstance(one, int | float) for one in numbers):
        raise SpecError(f"{path}: 'hours' must be 24 numbers, one an hour of the day", fix=_FORMS)
    most = _need_threshold(threshold, path)
    cheap = tuple((0, 6, hour * 60, hour * 60 + 60) for hour, value in enumerate(numbers) if value <= most)
    return cheap if cheap else _none_below(most, min(numbers), path)


def _need_threshold(threshold: Any, path: Path) -> float:
    if not isinstance(threshold, int | float):
        raise SpecError(
            f"{path} has values, and no threshold says which hours are good",
            fix="add --early_stopping.energy.threshold=VALUE",
        )
    return float(threshold)


def _none_below(most: float, least: float, path: Path) -> Any:
    raise SpecError(
        f"no hour of {path} has a value of at most {most:g}: the least is {least:g}", fix="raise the threshold"
    )


def _zone(name: str, path: Path) -> tzinfo:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise SpecError(f"{path}: unknown time zone '{name}'", fix="give one as Europe/Berlin, or UTC") from None


def _read_csv(path: Path, threshold: float | None) -> Dated:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets begin UTF-8 with a mark
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}", fix="check the path") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is no text in UTF-8", fix=_FORMS) from None
    rows = [row for row in csv.reader(lines) if row]
    header = [name.strip().lower() for name in rows[0]] if rows else []
    if len(header) < 2 or len(rows) < 2 or (header[:2] != ["start", "end"] and header[0] != "time"):
        raise SpecError(f"{path} has other columns than start,end or time,value", fix=_FORMS)
    whole = [(number, row) for number, row in enumerate(rows[1:], 2)]
    if short := [number for number, row in whole if len(row) < 2]:
        raise SpecError(f"{path}, line {short[0]}: it has one column", fix=_FORMS)
    times = [_time(row[0], path, number) for number, row in whole]
    if header[1] == "end":
        windows = [(start, _time(row[1], path, number)) for start, (number, row) in zip(times, whole, strict=True)]
        wrong = next((number for (start, end), (number, _) in zip(windows, whole, strict=True) if end <= start), None)
        if wrong is not None:
            raise SpecError(f"{path}, line {wrong}: the window ends before it starts", fix="exchange start and end")
        return Dated(tuple(sorted(windows)))
    most = _need_threshold(threshold, path)
    values = [_number(row, path, number) for number, row in whole]
    return Dated(_below(times, values, most, path))


def _below(
    times: Sequence[datetime], values: Sequence[float], most: float, path: Path
) -> tuple[tuple[datetime, datetime], ...]:
    """Windows in which the value is at most `most`; the last value holds as long as the one before it."""
    if len(times) < 2 or any(after <= before for before, after in pairwise(times)):
        raise SpecError(f"{path}: its times do not rise from row to row", fix="sort the rows by time, each time once")
    ends = [*times[1:], times[-1] + (times[-1] - times[-2])]
    found = [(begin, end) for begin, end, value in zip(times, ends, values, strict=True) if value <= most]
    return tuple(found) if found else _none_below(most, min(values), path)


def _time(text: str, path: Path, line: int) -> datetime:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SpecError(f"{path}, line {line}: '{text}' is no time", fix="write 2026-01-31T22:00+01:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _number(row: Sequence[str], path: Path, line: int) -> float:
    try:
        return float(row[1])
    except (ValueError, IndexError):
        raise SpecError(f"{path}, line {line}: no number in the second column", fix=_FORMS) from None
