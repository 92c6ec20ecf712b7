"""The texts on the page: samples of what each data step dropped, and the models' samples."""

from __future__ import annotations

from typing import Any

from hone.report import arms, bars, units
from hone.report.collect import Line, Row, finite, mappings, sound
from hone.report.sections import both

CUT_OUT = "cut_out"
"""The reason under which stats.json counts text cut out of kept documents."""


def data(line: Line, row: Row) -> dict[str, Any]:
    """Waterfalls, reasons with samples, languages and sources of one data artifact."""
    stats = row.content.get("stats.json") or {}
    steps = mappings(stats.get("steps"))
    falls = []
    for title, key, unit in (("Text", "bytes", "B"), ("Documents", "documents", "documents")):
        known = [
            (str(step.get("name", "?")), *pair[0])
            for step in steps
            if (pair := finite([(step.get(f"{key}_in"), step.get(f"{key}_out"))]))
        ]
        if known:
            falls.append(
                (
                    title,
                    both(
                        lambda width, known=known, unit=unit, title=title: bars.waterfall(
                            known, width, unit, f"{title} left after each step"
                        )
                    ),
                )
            )
    reasons = _reasons(steps, row.content.get("dropped.jsonl") or [])
    words = [
        f"{units.show(row.value(name), row.figures[name].unit, name)} {units.label(name).rpartition(' ')[2] if name.endswith('bytes') else ''}".strip()
        for name in ("input_bytes", "kept_bytes", "train_tokens")
        if row.value(name) is not None
    ]
    shares = []
    for title, key in (("Languages kept", "languages"), ("Sources kept", "sources")):
        table = stats.get(key)
        if isinstance(table, dict) and table:
            entries = finite_items(table)
            if entries:
                shown = [bars.Bar(name, value) for name, value in entries[:8]]
                title += f": the 8 largest of {len(entries)}" if len(entries) > 8 else ""
                shares.append(
                    (
                        title,
                        both(lambda width, shown=shown, title=title: bars.bars(shown, width, "B", f"{title} by bytes")),
                    )
                )
    return {
        "row": row,
        "warnings": stats["warnings"] if _all_text(stats.get("warnings")) else [],
        "words": f"{row.id}: {', '.join(words)}." if words else row.id,
        "falls": falls,
        "reasons": reasons,
        "rules": _rules(steps),
        "shares": shares,
        "samples": [_sample(entry) for entry in (row.content.get("sample.jsonl") or [])[:3]],
    }


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def finite_items(table: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, bytes) of a statistics table, largest first."""
    found = [(str(name), entry.get("bytes")) for name, entry in table.items() if isinstance(entry, dict)]
    known = [(name, float(value)) for name, value in found if sound(value)]
    return sorted(known, key=lambda entry: (-entry[1], entry[0]))


def _reasons(steps: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every reason of every step with its amounts and samples; samples of an uncounted reason come last."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps:
        reasons = step.get("reasons")
        for reason, amounts in reasons.items() if isinstance(reasons, dict) else ():
            known = finite([(amounts.get("documents"), amounts.get("bytes"))] if isinstance(amounts, dict) else [])
            documents, size = known[0] if known else (0.0, 0.0)
            name = f"{step.get('name', '?')}: {reason}"
            found[str(step.get("name")), str(reason)] = {
                "name": name,
                "words": _cut_words(step, size)
                if reason == CUT_OUT
                else f"{units.show(documents, 'documents')}, {units.show_bytes(size)}",
                "samples": [],
            }
    for entry in dropped:
        key = (str(entry.get("step")), str(entry.get("reason")))
        found.setdefault(key, {"name": f"{key[0]}: {key[1]}", "words": "", "samples": []})["samples"].append(
            _sample(entry)
        )
    return list(found.values())


def _cut_words(step: dict[str, Any], size: float) -> str:
    """What an edit cut out of kept documents."""
    figures = step.get("figures")
    documents = figures.get("cut_documents") if isinstance(figures, dict) else None
    where = units.show(float(documents), "documents") if sound(documents) else "documents"
    return f"{units.show_bytes(size)} out of {where} that are kept"


def _rules(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Rules that drop documents: (filter, reason, expression, bytes dropped alone, bytes only it drops); how many drop none."""
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
    return {"rows": [row[1:] for row in sorted(rows)], "idle": idle}


def _sample(entry: dict[str, Any]) -> dict[str, str]:
    like = f", a copy of {entry['duplicate_of']}" if entry.get("duplicate_of") else ""
    return {"source": f"{entry.get('source', '')}{like}", "text": str(entry.get("text", ""))[:2000]}


def sayings(line: Line, most: int = 6) -> list[dict[str, Any]]:
    """For each prompt the distinct texts, with the runs that generated them and where they differ from the first."""
    texts: dict[str, dict[str, list[str]]] = {}
    for arm in arms.serving(line):
        for entry in arm.rows[0].content.get("samples.jsonl") or []:
            texts.setdefault(str(entry.get("prompt", "")), {}).setdefault(str(entry.get("text", "")), []).append(
                arm.name
            )
    found = []
    for prompt, by_text in list(texts.items())[:most]:
        order = sorted(by_text, key=lambda text: ("plain" not in by_text[text], -len(by_text[text])))
        groups = []
        for text in order:
            same = len(text) if text == order[0] else _agreeing(text, order[0])
            groups.append({"runs": ", ".join(by_text[text]), "same": text[:same], "other": text[same:]})
        found.append({"prompt": prompt, "groups": groups})
    return found


def sampling_words(line: Line) -> str:
    """The sampling parameters of the texts: 'temperature 0.7, top p 0.9'; '' when the runs have none."""
    drawn = next(
        (entry.get("sampling") for row in line.of("serve") for entry in row.content.get("samples.jsonl") or []), None
    )
    names = ("temperature", "top_p", "repetition_penalty")
    known = drawn if isinstance(drawn, dict) else {}
    return ", ".join(f"{name.replace('_', ' ')} {known[name]}" for name in names if name in known)


def _agreeing(one: str, other: str) -> int:
    """The length of the common prefix of two texts, in characters."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
