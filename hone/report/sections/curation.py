"""The data room's results beside drops: scores, groups, evaluation examples that were found, packing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from hone.report import units
from hone.report.collect import Row, finite, mappings, sound

_MOST_GROUPS = 12
_MOST_EXAMPLES = 10
_QUALITY = {"auc": "area under the curve", "accuracy": "accuracy"}
_LEARNED = {
    "held_out": "held out",
    "high_documents": "good",
    "low_documents": "bad",
    "broken_documents": "unreadable",
    "entries": "entries of lists",
}
_GROUPS = {"language": "language", "group": "source"}


class Sample(NamedTuple):
    """A text, cut off, and where it came from."""

    source: str
    text: str


class Scorer(NamedTuple):
    """A scorer: its quality on held-out texts, its training data, and the share sent to an expensive scorer."""

    name: str
    column: str
    quality: str
    learned: str
    dear: str


@dataclass(frozen=True)
class Group:
    """The outcome for the documents of one group."""

    name: str
    documents: str
    dropped: str
    silenced: bool
    """Whether much more of it is dropped than of the rest: at most half as much stays."""
    far: list[str]
    """Steps that drop a much larger share of it, with that of the rest."""
    scores: list[str]


@dataclass(frozen=True)
class GroupTable:
    """The outcome by group; `words` are sentences on steps that drop a much larger share of one than of the rest."""

    title: str
    rows: list[Group]
    more: int
    """Smaller groups that are left out."""
    scores: list[str]
    """Names of the scores whose means the groups have."""
    words: list[str]


class EvaluationSet(NamedTuple):
    """An evaluation set in a decontamination: counts of examples, the share found, documents that contain any."""

    name: str
    examples: str
    short: str
    """Too short to search for."""
    hit: str
    share: str
    documents: str


@dataclass(frozen=True)
class Example:
    """An evaluation example that was found, with texts that contain it."""

    name: str
    words: str
    text: str
    samples: list[Sample]


@dataclass(frozen=True)
class Decontamination:
    """A step's evaluation sets, and the examples in most documents; `looked` is the number of documents searched, or ''."""

    name: str
    sets: list[EvaluationSet]
    looked: str
    examples: list[Example]
    more: int
    """Examples that are left out."""


class Packing(NamedTuple):
    """Sequences of the training split of one length and packing: their number, positions without a target, split documents."""

    length: str
    way: str
    rows: str
    waste: str
    parted: str


@dataclass(frozen=True)
class Curation:
    """All of these results of a data artifact; `skipped` are files of other kinds, in words."""

    scorers: list[Scorer]
    groups: list[GroupTable]
    contamination: list[Decontamination]
    packing: list[Packing]
    skipped: str

    @classmethod
    def of(cls, row: Row) -> Curation:
        stats = row.content.get("stats.json") or {}
        return cls(scorers(stats), groups(stats), contamination(row), packing(stats), skipped(stats))


def scorers(stats: dict[str, Any]) -> list[Scorer]:
    """A row per scorer."""
    found = []
    for row in mappings(stats.get("scorers")):
        figures = {str(name): value for name, value in row.items() if sound(value)}
        dear = figures.pop("dear_share", None)
        quality, learned = {}, {}
        for name, value in figures.items():
            part, bare = _part(name)
            if bare in _QUALITY:
                quality.setdefault(part, []).append(f"{_QUALITY[bare]} {units.three(value)}")
            elif value or bare not in _LEARNED:
                count = f"{value:,.0f}" if float(value).is_integer() else units.three(value)
                learned.setdefault(part, []).append(f"{_LEARNED.get(bare, bare.replace('_', ' '))} {count}")
        found.append(
            Scorer(
                name=str(row.get("name", "?")),
                column=str(row.get("column", "?")),
                quality=_parts(quality),
                learned=_parts(learned),
                dear=units.show(dear, "fraction") if dear is not None else "",
            )
        )
    return found


def _part(name: str) -> tuple[str, str]:
    """('cheap', 'auc') of 'cheap_auc', as a cascade has two scorers."""
    part, _, bare = name.partition("_")
    return (part, bare) if part in ("cheap", "dear") and bare else ("", name)


def _parts(words: dict[str, list[str]]) -> str:
    return "; ".join(f"{part}: {', '.join(said)}" if part else ", ".join(said) for part, said in words.items())


def groups(stats: dict[str, Any]) -> list[GroupTable]:
    """Tables of the outcome for each language and each source."""
    found = []
    tables = stats.get("groups")
    for column, table in tables.items() if isinstance(tables, dict) else ():
        made = _group_table(str(column), table) if isinstance(table, dict) else None
        if made:
            found.append(made)
    return found


def _group_table(column: str, table: dict[str, Any]) -> GroupTable | None:
    read = {
        str(name): entry for name, entry in table.items() if isinstance(entry, dict) and _count(entry.get("documents"))
    }
    sizes = {name: _count(entry["documents"]) for name, entry in read.items()}
    lost = {name: _counts(entry.get("dropped")) for name, entry in read.items()}
    whole = sum(sizes.values())
    totals: dict[str, float] = {}
    for counts in lost.values():
        for step, count in counts.items():
            totals[step] = totals.get(step, 0) + count
    scored = list(dict.fromkeys(score for entry in read.values() for score in _scores(entry)))
    rows, words = [], []
    for name, size in sizes.items():
        dropped, rest = sum(lost[name].values()), sum(totals.values())
        far = sorted(
            (
                (count / size, (totals[step] - count) / (whole - size), step)
                for step, count in lost[name].items()
                if stands_out(count, size, totals[step] - count, whole - size)
            ),
            reverse=True,
        )
        words += [
            (share * size, f"{step} takes {_share(share)} of {name}, {_share(other)} of the rest")
            for share, other, step in far
        ]
        kept, kept_rest = 1 - dropped / size, 1 - (rest - dropped) / (whole - size) if whole > size else 0.0
        rows.append(
            Group(
                name=name,
                documents=units.show(size, "documents").removesuffix(" documents").removesuffix(" document"),
                dropped=_share(dropped / size),
                silenced=stands_out(dropped, size, rest - dropped, whole - size) and kept <= 0.5 * kept_rest,
                far=[f"{step} {_share(share)} (rest {_share(other)})" for share, other, step in far[:3]],
                scores=[
                    units.three(_scores(read[name])[score]) if score in _scores(read[name]) else "" for score in scored
                ],
            )
        )
    if not rows or (len(rows) < 2 and not scored):
        return None
    shown = [row for place, row in enumerate(rows) if place < _MOST_GROUPS or row.far]
    return GroupTable(
        title=_GROUPS.get(column, column),
        rows=shown,
        more=len(rows) - len(shown),
        scores=scored,
        words=[text for _, text in sorted(words, reverse=True)[:3]],
    )


def stands_out(count: float, size: float, other: float, rest: float) -> bool:
    """Whether the share `count` of `size` is at least twice the share `other` of `rest`, by more than chance (three deviations)."""
    if count < 5 or size <= 0 or rest <= 0:
        return False
    share, beside, both_ = count / size, other / rest, (count + other) / (size + rest)
    deviation = math.sqrt(max(both_ * (1 - both_), 0) * (1 / size + 1 / rest))
    return share >= 2 * beside and share - beside >= max(0.05, 3 * deviation)


def _count(value: Any) -> float:
    return float(value) if sound(value) and value > 0 else 0.0


def _counts(value: Any) -> dict[str, float]:
    return {str(name): _count(count) for name, count in value.items()} if isinstance(value, dict) else {}


def _scores(entry: dict[str, Any]) -> dict[str, float]:
    scores = entry.get("scores")
    return {str(name): value for name, value in scores.items() if sound(value)} if isinstance(scores, dict) else {}


def _share(value: float) -> str:
    return units.show(value, "fraction", digits=2) if value else "0 %"


def contamination(row: Row) -> list[Decontamination]:
    """For each decontamination: its evaluation sets with the number of examples found, and the examples in most documents."""
    stats = row.content.get("stats.json") or {}
    hits = row.content.get("contamination.jsonl") or []
    found = []
    for step in mappings(stats.get("steps")):
        figures = step.get("figures")
        sets = figures.get("evaluations") if isinstance(figures, dict) else None
        if not isinstance(sets, dict):
            continue
        name, rows = str(step.get("name", "?")), []
        for evaluation, counts in sets.items():
            keys = ("examples", "too_short", "hit", "documents")
            known = (
                finite([tuple(counts.get(key) for key in keys[:2]), tuple(counts.get(key) for key in keys[2:])])
                if isinstance(counts, dict)
                else []
            )
            if len(known) == 2:
                (examples, short), (hit, documents) = known
                searched = examples - short
                rows.append(
                    EvaluationSet(
                        str(evaluation),
                        *(f"{count:,.0f}" for count in (examples, short, hit)),
                        share=_share(hit / searched) if searched > 0 else "-",
                        documents=f"{documents:,.0f}",
                    )
                )
        own = [hit for hit in hits if str(hit.get("step")) == name]
        looked = figures.get("documents")
        looked_through = looked.get("looked_through") if isinstance(looked, dict) else None
        found.append(
            Decontamination(
                name=name,
                sets=rows,
                looked=f"{looked_through:,.0f}" if sound(looked_through) else "",
                examples=[_example(hit) for hit in own[:_MOST_EXAMPLES]],
                more=max(0, len(own) - _MOST_EXAMPLES),
            )
        )
    return found


def _example(hit: dict[str, Any]) -> Example:
    documents = hit.get("documents")
    count = f"{documents:,.0f}" if sound(documents) else "?"
    return Example(
        name=f"{hit.get('evaluation', '?')}, row {hit.get('row', '?')}",
        words=f"in {count} document{'' if documents == 1 else 's'}",
        text=str(hit.get("text", ""))[:2000],
        samples=[
            Sample(str(sample.get("source", "")), str(sample.get("text", ""))[:2000])
            for sample in mappings(hit.get("samples"))
        ],
    )


def packing(stats: dict[str, Any]) -> list[Packing]:
    """Both packings of the training split, at every sequence length that was counted."""
    table = stats.get("packing")
    found = []
    for length, ways in table.items() if isinstance(table, dict) else ():
        for way, counts in ways.items() if isinstance(ways, dict) else ():
            values = [counts.get(key) for key in ("rows", "waste", "parted")] if isinstance(counts, dict) else []
            if values and all(sound(value) for value in values):
                rows, waste, parted = values
                words = str(way).replace("_", " ")
                found.append(Packing(str(length), words, f"{rows:,.0f}", _share(waste), f"{parted:,.0f}"))
    return found


def skipped(stats: dict[str, Any]) -> str:
    """Files that were not read because of their kind, in words; '' when there were none."""
    steps = mappings(stats.get("steps"))
    kinds = _counts(steps[0].get("skipped")) if steps else {}
    most = sorted(((count, kind) for kind, count in kinds.items() if count), reverse=True)
    words = [f"{count:,.0f} {kind}" for count, kind in most[:6]]
    return ", ".join(words) + (f" and {len(most) - 6} kinds more" if len(most) > 6 else "")
