"""Mixtures: how much of each source a training read, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from markupsafe import Markup

from hone.report import bars, units
from hone.report.collect import Line, Row, mappings, sound
from hone.report.sections.base import FULL, both

_OPTIONAL = (("utility", "Utility"), ("loss", "Validation loss"))


class Share(NamedTuple):
    """A source's part of a mixture as text; '' where a number is not known."""

    source: str
    tokens: str
    wanted: str
    """Its share before the cap on epochs."""
    weight: str
    epochs: str
    loss: str
    utility: str
    reason: str


@dataclass(frozen=True)
class Mixture:
    """The shares of one mixture, and the trainings that had them."""

    kind: str
    runs: list[str]
    chart: Markup
    shares: list[Share]
    columns: list[tuple[str, str]]
    """(field of Share, heading) of those optional fields that some source has."""
    capped: bool
    notes: Mapping[str, Any] | None
    """How the shares were computed, as the stage wrote it."""


@dataclass(frozen=True)
class Mixtures:
    """Every mixture, trainings with equal shares together."""

    id: ClassVar[str] = "mixture"
    title: ClassVar[str] = "Mixture"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    mixtures: list[Mixture]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found: dict[str, Mixture] = {}
        for row in line.of("train"):
            content = row.content.get("mixture.json")
            shares = [share for share in mappings((content or {}).get("shares")) if sound(share.get("weight"))]
            if not shares:
                continue
            notes = content.get("notes") if content else None
            mixture = row.spec.get("mixture")
            kind = str(mixture.get("kind", "?")) if isinstance(mixture, dict) else "?"
            key = json.dumps([kind, shares, notes], sort_keys=True)
            if key in found:
                found[key].runs.append(row.id)
            else:
                found[key] = _mixture(row, kind, shares, notes)
        return cls(list(found.values())) if found else None


def _mixture(row: Row, kind: str, shares: list[dict[str, Any]], notes: Any) -> Mixture:
    shown = [
        bars.Bar(str(share.get("source", "?")), float(share["weight"]), strong=not share.get("capped"))
        for share in shares
    ]
    said = f"Shares of {len(shares)} sources in {row.id}"
    rows = [_share_row(row, share) for share in shares]
    return Mixture(
        kind=kind,
        runs=[row.id],
        chart=both(lambda width: bars.bars(shown, width, "fraction", said), FULL),
        shares=rows,
        columns=[(name, words) for name, words in _OPTIONAL if any(getattr(share, name) for share in rows)],
        capped=any(share.get("capped") for share in shares),
        notes=notes if isinstance(notes, dict) and notes else None,
    )


def _share_row(row: Row, share: dict[str, Any]) -> Share:
    source = str(share.get("source", "?"))

    def words(key: str, unit: str = "") -> str:
        value = share.get(key)
        return units.show(value, unit) if sound(value) else ""

    read, loss = row.value(f"epochs_{source}"), row.value(f"val_loss_{source}")
    return Share(
        source=source,
        tokens=words("tokens"),
        wanted=words("wanted", "fraction"),
        weight=words("weight", "fraction"),
        epochs=units.three(read) if read is not None else words("epochs"),
        loss=units.three(loss) if loss is not None else "",
        utility=words("utility"),
        reason=str(share.get("reason", "")),
    )
