"""The data room's results beside drops: scores, groups, evaluation examples that were found, packing, mixtures."""

from __future__ import annotations

import json
import math
from typing import Any

from hone.report import bars, units
from hone.report.collect import Line, Row, finite, mappings, sound
from hone.report.sections import FULL, both

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


def of(row: Row) -> dict[str, Any]:
    """All of these results of a data artifact."""
    stats = row.content.get("stats.json") or {}
    return {
        "scorers": scorers(stats),
        "groups": groups(stats),
        "contamination": contamination(row),
        "packing": packing(stats),
        "skipped": skipped(stats),
    }


def scorers(stats: dict[str, Any]) -> list[dict[str, str]]:
    """A row per scorer: its quality on held-out texts, its training data, and the share sent to an expensive scorer."""
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
            {
                "name": str(row.get("name", "?")),
                "column": str(row.get("column", "?")),
                "quality": _parts(quality),
                "learned": _parts(learned),
                "dear": units.show(dear, "fraction") if dear is not None else "",
            }
        )
    return found


def _part(name: str) -> tuple[str, str]:
    """('cheap', 'auc') of 'cheap_auc', as a cascade has two scorers."""
    part, _, bare = name.partition("_")
    return (part, bare) if part in ("cheap", "dear") and bare else ("", name)


def _parts(words: dict[str, list[str]]) -> str:
    return "; ".join(f"{part}: {', '.join(said)}" if part else ", ".join(said) for part, said in words.items())


def groups(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Tables of the outcome for each language and each source, and sentences on steps that drop a much larger share of one than of the rest."""
    found = []
    tables = stats.get("groups")
    for column, table in tables.items() if isinstance(tables, dict) else ():
        made = _group_table(str(column), table) if isinstance(table, dict) else None
        if made:
            found.append(made)
    return found


def _group_table(column: str, table: dict[str, Any]) -> dict[str, Any] | None:
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
            {
                "name": name,
                "documents": units.show(size, "documents").removesuffix(" documents").removesuffix(" document"),
                "dropped": _share(dropped / size),
                "silenced": stands_out(dropped, size, rest - dropped, whole - size) and kept <= 0.5 * kept_rest,
                "far": [f"{step} {_share(share)} (rest {_share(other)})" for share, other, step in far[:3]],
                "scores": [
                    units.three(_scores(read[name])[score]) if score in _scores(read[name]) else "" for score in scored
                ],
            }
        )
    if not rows or (len(rows) < 2 and not scored):
        return None
    shown = [row for place, row in enumerate(rows) if place < _MOST_GROUPS or row["far"]]
    return {
        "title": _GROUPS.get(column, column),
        "rows": shown,
        "more": len(rows) - len(shown),
        "scores": scored,
        "words": [text for _, text in sorted(words, reverse=True)[:3]],
    }


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


def contamination(row: Row) -> list[dict[str, Any]]:
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
                    (
                        str(evaluation),
                        *(f"{count:,.0f}" for count in (examples, short, hit)),
                        _share(hit / searched) if searched > 0 else "-",
                        f"{documents:,.0f}",
                    )
                )
        own = [hit for hit in hits if str(hit.get("step")) == name]
        looked = figures.get("documents")
        looked_through = looked.get("looked_through") if isinstance(looked, dict) else None
        found.append(
            {
                "name": name,
                "sets": rows,
                "looked": f"{looked_through:,.0f}" if sound(looked_through) else "",
                "examples": [_example(hit) for hit in own[:_MOST_EXAMPLES]],
                "more": max(0, len(own) - _MOST_EXAMPLES),
            }
        )
    return found


def _example(hit: dict[str, Any]) -> dict[str, Any]:
    documents = hit.get("documents")
    count = f"{documents:,.0f}" if sound(documents) else "?"
    return {
        "name": f"{hit.get('evaluation', '?')}, row {hit.get('row', '?')}",
        "words": f"in {count} document{'' if documents == 1 else 's'}",
        "text": str(hit.get("text", ""))[:2000],
        "samples": [
            {"source": str(sample.get("source", "")), "text": str(sample.get("text", ""))[:2000]}
            for sample in mappings(hit.get("samples"))
        ],
    }


def packing(stats: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """(sequence length, packing, sequences, share of positions without a target, split documents) of the training split."""
    table = stats.get("packing")
    found = []
    for length, ways in table.items() if isinstance(table, dict) else ():
        for way, counts in ways.items() if isinstance(ways, dict) else ():
            values = [counts.get(key) for key in ("rows", "waste", "parted")] if isinstance(counts, dict) else []
            if values and all(sound(value) for value in values):
                rows, waste, parted = values
                found.append((str(length), str(way).replace("_", " "), f"{rows:,.0f}", _share(waste), f"{parted:,.0f}"))
    return found


def skipped(stats: dict[str, Any]) -> str:
    """Files that were not read because of their kind, in words; '' when there were none."""
    steps = mappings(stats.get("steps"))
    kinds = _counts(steps[0].get("skipped")) if steps else {}
    most = sorted(((count, kind) for kind, count in kinds.items() if count), reverse=True)
    words = [f"{count:,.0f} {kind}" for count, kind in most[:6]]
    return ", ".join(words) + (f" and {len(most) - 6} kinds more" if len(most) > 6 else "")


def mixtures(line: Line) -> list[dict[str, Any]]:
    """The shares of each mixture, trainings with equal shares together: a chart, a table with reasons, its notes."""
    found: dict[str, dict[str, Any]] = {}
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
            found[key]["runs"].append(row.id)
            continue
        shown = [
            bars.Bar(str(share.get("source", "?")), float(share["weight"]), strong=not share.get("capped"))
            for share in shares
        ]
        said = f"Shares of {len(shares)} sources in {row.id}"
        found[key] = {
            "kind": kind,
            "runs": [row.id],
            "chart": both(lambda width, shown=shown, said=said: bars.bars(shown, width, "fraction", said), FULL),
            "shares": [_share_row(row, share) for share in shares],
            "columns": [
                (key, words)
                for key, words in (("utility", "Utility"), ("loss", "Validation loss"))
                if any(_share_row(row, share)[key] for share in shares)
            ],
            "capped": any(share.get("capped") for share in shares),
            "notes": notes if isinstance(notes, dict) and notes else None,
        }
    return list(found.values())


def _share_row(row: Row, share: dict[str, Any]) -> dict[str, str]:
    source = str(share.get("source", "?"))

    def words(key: str, unit: str = "") -> str:
        value = share.get(key)
        return units.show(value, unit) if sound(value) else ""

    read, loss = row.value(f"epochs_{source}"), row.value(f"val_loss_{source}")
    return {
        "source": source,
        "tokens": words("tokens"),
        "wanted": words("wanted", "fraction"),
        "weight": words("weight", "fraction"),
        "epochs": units.three(read) if read is not None else words("epochs"),
        "loss": units.three(loss) if loss is not None else "",
        "utility": words("utility"),
        "reason": str(share.get("reason", "")),
    }
