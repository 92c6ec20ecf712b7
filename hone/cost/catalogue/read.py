"""Reads the hardware catalogue: hone's rows and a user's own, by name."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hone.base.errors import SpecError, did_you_mean
from hone.base.spec import in_file, read_yaml
from hone.cost.catalogue.rows import Accelerator, Cooling, Grid, Link, Price, Source, Sourced, Target

_HERE = Path(__file__).parent
_LISTS: dict[str, type[Sourced]] = {
    "accelerators": Accelerator,
    "links": Link,
    "prices": Price,
    "grids": Grid,
    "cooling": Cooling,
}
OWN = "own"
"""Key of the source of a user's rows that name none."""

Row = TypeVar("Row", bound=Sourced)


class Catalogue(NamedTuple):
    """All rows. A user's rows stand before hone's, so that they are found first."""

    accelerators: tuple[Accelerator, ...]
    links: tuple[Link, ...]
    prices: tuple[Price, ...]
    grids: tuple[Grid, ...]
    cooling: tuple[Cooling, ...]
    sources: dict[str, Source]

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator of this name or short name, in any case. Raises SpecError with the nearest one."""
        wanted = _plain(name)
        for one in self.accelerators:
            if wanted in map(_plain, (one.name, *one.names)):
                return one
        known = [one.short for one in self.accelerators]
        raise SpecError(
            f"no accelerator '{name}' in the catalogue",
            fix=f"{did_you_mean(name, known)}`hone hardware` lists them; a file of your own: --hardware=my.yaml",
        )

    def of_processor(self, processor: str) -> Accelerator | None:
        """The accelerator of which a driver reports the name `processor`: that with the longest `match` in it; None without one."""
        found = [
            (len(part), -place)
            for place, one in enumerate(self.accelerators)
            for part in (*one.match.split("|"), one.name)
            if part and part in processor
        ]
        return self.accelerators[-max(found)[1]] if found else None

    def link(self, name: str | None) -> Link | None:
        """The link of this name; None for None. Raises SpecError for an unknown one."""
        return None if name is None else _named(name, self.links, "link")

    def cooled(self, name: str) -> Cooling:
        """The cooling of this name. Raises SpecError for an unknown one."""
        return _named(name, self.cooling, "cooling")

    def grid(self, name: str, year: int | None = None) -> Grid:
        """The grid of this name in `year`, or in the latest one. Raises SpecError for an unknown one."""
        rows = [one for one in self.grids if one.name.lower() == name.lower() or one.title.lower() == name.lower()]
        if not rows:
            known = [*dict.fromkeys(one.name for one in self.grids)]
            raise SpecError(
                f"no grid '{name}' in the catalogue", fix=f"{did_you_mean(name, known)}known: {', '.join(known)}"
            )
        if year is None:
            return max(rows, key=lambda one: one.year)
        for one in rows:
            if one.year == year:
                return one
        years = ", ".join(str(one.year) for one in rows)
        raise SpecError(f"the catalogue has no year {year} of grid '{name}'", fix=f"use one of {years}")

    def prices_of(self, accelerator: Accelerator, kind: str | None = None) -> tuple[Price, ...]:
        """What hours of `accelerator` cost, of one kind or of all; () where nothing is known."""
        names = {_plain(accelerator.name), *map(_plain, accelerator.names)}
        return tuple(
            one for one in self.prices if _plain(one.accelerator) in names and (kind is None or one.kind == kind)
        )

    def source(self, row: Sourced, field: str) -> Source:
        """The source of a value."""
        return self.sources[row.source_of(field)]


@cache
def catalogue(hardware: str | None = None) -> Catalogue:
    """hone's catalogue with the rows of `hardware`, a YAML file or a folder of them, before it; by default those of `own_folder()`.

    Raises SpecError for a file that names no row or a wrong one, with its field.
    """
    rows: dict[str, list[Any]] = {name: [] for name in _LISTS}
    sources: dict[str, Source] = {OWN: Source(title="the user's own file", url="", date="unknown")}
    for file in _files(hardware):
        _add_file(file, rows, sources)
    for name, cls in _LISTS.items():
        rows[name] += [cls.read(one) for one in json.loads((_HERE / f"{name}.json").read_text(encoding="utf8"))]
    shipped = json.loads((_HERE / "sources.json").read_text(encoding="utf8"))
    sources = {**{name: Source.read(one) for name, one in shipped.items()}, **sources}
    found = Catalogue(**{name: tuple(rows[name]) for name in _LISTS}, sources=sources)
    _check(found)
    return found


@cache
def targets() -> tuple[Target, ...]:
    """Families of hardware and their number formats."""
    return tuple(Target.read(one) for one in json.loads((_HERE / "targets.json").read_text(encoding="utf8")))


def own_folder() -> Path:
    """The folder of a user's own hardware files: `hone/hardware` in $XDG_CONFIG_HOME, else in ~/.config. It need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hone" / "hardware"


def _files(hardware: str | None) -> list[Path]:
    if hardware is None:
        return sorted(own_folder().glob("*.y*ml")) if own_folder().is_dir() else []
    where = Path(hardware)
    if where.is_dir():
        found = sorted(where.glob("*.y*ml"))
        if not found:
            raise SpecError(f"{where} has no YAML file", fix="write one there, or name a file: --hardware=my.yaml")
        return found
    if not where.is_file():
        raise SpecError(f"no file {where}", fix="name a YAML file of accelerators, or a folder of such files")
    return [where]


def _add_file(file: Path, rows: dict[str, list[Any]], sources: dict[str, Source]) -> None:
    """Adds the rows of a user's `file`: lists by name, or one accelerator alone."""
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise SpecError(f"{file} is no mapping", fix="write `accelerators:` and under it a list of rows")
    if "name" in values:
        values = {"accelerators": [values]}
    for name, given in values.items():
        if name == "sources":
            for key, one in (given or {}).items():
                sources[key] = _read(Source, one, file)
            continue
        if name not in _LISTS:
            raise SpecError(
                f"{file} has a list '{name}'", fix=f"{did_you_mean(name, _LISTS)}known: {', '.join(_LISTS)}, sources"
            )
        if not isinstance(given, list):
            raise SpecError(f"{file}: {name} is {given!r}", fix=f"write {name} as a list of rows, each begun by '- '")
        rows[name] += [_read(_LISTS[name], one, file) for one in given]


def _read(cls: Any, values: Any, file: Path) -> Any:
    try:
        return cls.read(values)
    except SpecError as error:
        placed = in_file(error, file)
        raise placed if placed is not error else SpecError(f"{file}: {error.what}", fix=error.fix) from None


def _check(found: Catalogue) -> None:
    """Raises SpecError where a row names a link, a cooling, an accelerator or a source that is not there."""
    links, coolings = {one.name for one in found.links}, {one.name for one in found.cooling}
    for one in found.accelerators:
        for field in ("link", "host_link", "network"):
            if (name := getattr(one, field)) is not None and name not in links:
                _unknown(f"{one.name}.{field}", name, links)
        for name in one.cooling:
            if name not in coolings:
                _unknown(f"{one.name}.cooling", name, coolings)
    known = {_plain(name) for one in found.accelerators for name in (one.name, *one.names)}
    for price in found.prices:
        if _plain(price.accelerator) not in known:
            _unknown("prices.accelerator", price.accelerator, [one.name for one in found.accelerators])
    for row in (*found.accelerators, *found.links, *found.prices, *found.grids, *found.cooling):
        for key in row.sources.values():
            if key not in found.sources:
                _unknown(f"{getattr(row, 'name', 'prices')}.sources", key, found.sources)


def _unknown(field: str, name: str, known: Any) -> None:
    raise SpecError(
        f"{field} names '{name}', which the catalogue does not have",
        fix=f"{did_you_mean(name, known)}known: {', '.join(sorted(known))}",
    )


def _named(name: str, rows: tuple[Any, ...], what: str) -> Any:
    for one in rows:
        if one.name == name:
            return one
    known = [one.name for one in rows]
    raise SpecError(f"no {what} '{name}' in the catalogue", fix=f"{did_you_mean(name, known)}known: {', '.join(known)}")


def _plain(name: str) -> str:
    """A name without case, spaces, hyphens and underscores."""
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
