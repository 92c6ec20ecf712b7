"""Data artifacts: what each step kept and dropped, with samples, and what else the data room found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from hone.report import bars, units
from hone.report.collect import Line, Row, finite, mappings, sound
from hone.report.sections.base import Panel, both
from hone.report.sections.curation import Curation, Sample

CUT_OUT = "cut_out"
"""The reason under which stats.json counts text cut out of kept documents."""


@dataclass(frozen=True)
class Reason:
    """A step's reason for dropping text, its amounts in words, and samples."""

    name: str
    words: str
    samples: list[Sample] = field(default_factory=list)


class Rule(NamedTuple):
    """A filter's rule: a document is kept if `keep`; the bytes that it drops alone, and those that only it drops."""

    filter: str
    reason: str
    keep: str
    alone: str
    only: str


@dataclass(frozen=True)
class Rules:
    """Rules that drop documents, and the number of those that drop none."""

    rows: list[Rule]
    idle: int


@dataclass(frozen=True)
class DataSet:
    """One data artifact."""

    row: Row
    warnings: list[str]
    words: str
    falls: list[Panel]
    """What is left after each step: of the text, of the documents."""
    reasons: list[Reason]
    rules: Rules
    shares: list[Panel]
    """Languages and sources of what was kept."""
    samples: list[Sample]
    """Of what was kept."""
    found: Curation

    @property
    def far(self) -> list[str]:
        """Sentences on groups that lose much more than the rest."""
        return [words for table in self.found.groups for words in table.words]


@dataclass(frozen=True)
class Data:
    """Every data artifact."""

    id: ClassVar[str] = "data"
    title: ClassVar[str] = "Data"
    stages: ClassVar[tuple[str, ...]] = ("data",)

    sets: list[DataSet]

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = [data_set(row) for row in line.of("data")]
        return cls(found) if found else None


def data_set(row: Row) -> DataSet:
    """All that the page says of a data artifact."""
    stats = row.content.get("stats.json") or {}
    steps = mappings(stats.get("steps"))
    words = [
        f"{units.show(row.value(name), row.figures[name].unit, name)} {units.label(name).rpartition(' ')[2] if name.endswith('bytes') else ''}".strip()
        for name in ("input_bytes", "kept_bytes", "train_tokens")
        if row.value(name) is not None
    ]
    return DataSet(
        row=row,
        warnings=stats["warnings"] if _all_text(stats.get("warnings")) else [],
        words=f"{row.id}: {', '.join(words)}." if words else row.id,
        falls=_falls(steps),
        reasons=_reasons(steps, row.content.get("dropped.jsonl") or []),
        rules=_rules(steps),
        shares=_shares(stats),
        samples=[_sample(entry) for entry in (row.content.get("sample.jsonl") or [])[:3]],
        found=Curation.of(row),
    )


def _falls(steps: list[dict[str, Any]]) -> list[Panel]:
    found = []
    for title, key, unit in (("Text", "bytes", "B"), ("Documents", "documents", "documents")):
        known = [
            (str(step.get("name", "?")), *pair[0])
            for step in steps
            if (pair := finite([(step.get(f"{key}_in"), step.get(f"{key}_out"))]))
        ]
        said = f"{title} left after each step"
        if known:
            chart = both(lambda width, known=known, unit=unit, said=said: bars.waterfall(known, width, unit, said))
            found.append(Panel(title, chart))
    return found


def _shares(stats: dict[str, Any]) -> list[Panel]:
    found = []
    for title, key in (("Languages kept", "languages"), ("Sources kept", "sources")):
        table = stats.get(key)
        entries = finite_items(table) if isinstance(table, dict) else []
        if entries:
            shown = [bars.Bar(name, value) for name, value in entries[:8]]
            title += f": the 8 largest of {len(entries)}" if len(entries) > 8 else ""
            said = f"{title} by bytes"
            chart = both(lambda width, shown=shown, said=said: bars.bars(shown, width, "B", said))
            found.append(Panel(title, chart))
    return found


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def finite_items(table: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, bytes) of a statistics table, largest first."""
    found = [(str(name), entry.get("bytes")) for name, entry in table.items() if isinstance(entry, dict)]
    known = [(name, float(value)) for name, value in found if sound(value)]
    return sorted(known, key=lambda entry: (-entry[1], entry[0]))


def _reasons(steps: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> list[Reason]:
    """Every reason of every step with its amounts and samples; samples of an uncounted reason come last."""
    found: dict[tuple[str, str], Reason] = {}
    for step in steps:
        reasons = step.get("reasons")
        for reason, amounts in reasons.items() if isinstance(reasons, dict) else ():
            known = finite([(amounts.get("documents"), amounts.get("bytes"))] if isinstance(amounts, dict) else [])
            documents, size = known[0] if known else (0.0, 0.0)
            name = f"{step.get('name', '?')}: {reason}"
            dropped_words = f"{units.show(documents, 'documents')}, {units.show_bytes(size)}"
            words = _cut_words(step, size) if reason == CUT_OUT else dropped_words
            found[str(step.get("name")), str(reason)] = Reason(name, words)
    for entry in dropped:
        key = (str(entry.get("step")), str(entry.get("reason")))
        found.setdefault(key, Reason(f"{key[0]}: {key[1]}", "")).samples.append(_sample(entry))
    return list(found.values())


def _cut_words(step: dict[str, Any], size: float) -> str:
    """What an edit cut out of kept documents."""
    figures = step.get("figures")
    documents = figures.get("cut_documents") if isinstance(figures, dict) else None
    where = units.show(float(documents), "documents") if sound(documents) else "documents"
    return f"{units.show_bytes(size)} out of {where} that are kept"


def _rules(steps: list[dict[str, Any]]) -> Rules:
    """The rules of all steps; those that drop most alone come first."""
    rows, idle = [], 0
    for step in steps:
        for rule in mappings(step.get("rules")):
            sides = [rule.get(side) for side in ("alone", "marginal")]
            sizes = finite([tuple(side.get("bytes") if isinstance(side, dict) else None for side in sides)])
            if not sizes:
                continue
            if not any(sizes[0]):
                idle += 1
                continue
            shown = [units.show_bytes(size) if size else "nothing" for size in sizes[0]]
            rows.append(
                (-sizes[0][0], str(step.get("name", "?")), str(rule.get("reason")), str(rule.get("keep")), *shown)
            )
    return Rules([Rule(*row[1:]) for row in sorted(rows)], idle)


def _sample(entry: dict[str, Any]) -> Sample:
    like = f", a copy of {entry['duplicate_of']}" if entry.get("duplicate_of") else ""
    return Sample(f"{entry.get('source', '')}{like}", str(entry.get("text", ""))[:2000])
