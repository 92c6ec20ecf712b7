"""Writes docs/data_before_after.md from the ledger: each class of failures, before and now, beside the peers of the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "data_before_after.md"
BEFORE = (
    "hone before", "before", "fast without the check (before)", "ngrams", "hone b371072", "languages apart",
)  # fmt: skip
"""Names that the ledger has for an earlier version or rule of this package."""
_MINE = ("careful", "fast")
_AGAIN = ("mask, faker: card, recall", "mask, faker: phone, recall")
"""Figures measured again after a change, without the others."""
_DECLARATION = (
    "declaration of human rights, which trained no identifier here; hone's constants were chosen on its first half"
)
_SCRIPTS = "declaration of human rights and texts made of it"
_RULES = "declaration of human rights and spam made of it, seen while the rules were written"
_PAGES = "84 pages that no option was chosen on"
_PLANTED = "planted items; the rule was tuned on arc_easy and gsm8k only, these are hellaswag, lambada, mmlu"

CLASSES: dict[str, list[tuple[str, str, str]]] = {
    "Near-duplicates in scripts without spaces": [
        *((f"recall at J .8, {one} (theory .91 to .92)", f"recall, {one}, J 0.8", _SCRIPTS) for one in ("Han", "kana", "Thai", "Lao", "Khmer", "Burmese", "Latin")),
        *((f"largest group of 50 copies with 1 % changed, {one}", f"50 copies with 1 % of the characters changed, {one}", _SCRIPTS) for one in ("Han", "kana", "Thai")),
    ],
    "Rules in every language": [
        *((f"one line 200 times, kept: {one}", f"rules, repeated_line texts that pass: {one}", _RULES) for one in ("zh", "ja", "th", "lo", "km", "my")),
        *((f"good texts kept: {one}", f"rules, good texts that pass: {one}", _RULES) for one in ("zh", "th", "ko", "bo", "the languages with spaces")),
        ("good texts kept, Korean law", "rules, other good texts that pass: ko", "constitution of Korea, on which nothing was changed"),
    ],
    "Languages": [
        ("accuracy, 150 characters, mean of 75", "language, declaration, 150 characters: accuracy", _DECLARATION),
        ("accuracy, 20 characters, mean of 75", "language, declaration, 20 characters: accuracy", _DECLARATION),
        ("pieces of languages outside the 75 that pass as some language", "language, other languages' declaration: pass for a language", "declaration in 185 languages that trained no rejector"),
        ("of these under a wrong name", "language, other languages' declaration: pass for a wrong language", "the same pieces"),
        ("the same, before the rejectors", "language, other languages' declaration: pass for a language, beside an earlier hone", "the same pieces"),
        *((f"{one} named as {name}, score at least .65", f"language, declaration, {one} named {name}, with a score of at least 0.65", _DECLARATION) for one, name in (("id", "msa"), ("ms", "msa"), ("bs", "hbs"), ("hr", "hbs"), ("sr", "hbs"), ("nb", "nor"), ("nn", "nor"))),
        *((f"other languages kept by a filter for {name}", f"language, declaration, other languages kept by a filter for {name}", _DECLARATION) for name in ("msa", "hbs", "nor")),
    ],
    "Web pages": [
        ("F1 of words, `fast`", "unseen HTML, the half not tuned on, fast: F1", _PAGES),
        ("MB/s a core, `fast`", "unseen HTML, fast: speed", "184 pages"),
    ],
    "Cleaning": [
        ("good pages of 763 lost for their notices", "c4: good pages lost for their notices", "763 texts, four notices added"),
        ("`mask`, cards found, values of Faker", "mask, faker: card, recall", "Faker's values; the patterns were widened after their first run on them"),
        ("`mask`, telephone numbers found, values of Faker", "mask, faker: phone, recall", "as above"),
    ],
    "Decontamination": [
        ("verbatim items found", "all sets, verbatim: recall", _PLANTED),
        ("lightly edited items found", "all sets, light edits: recall", _PLANTED),
        ("tables of numbers hit, of 300", "tables of numbers hit", "generated tables"),
    ],
}  # fmt: skip
"""{class: (what is measured, the ledger's figure, on which data)}."""


def latest() -> dict[str, dict[str | None, dict[str, Any]]]:
    """{figure: {peer: its latest row}} of the data room's ledger."""
    found: dict[str, dict[str | None, dict[str, Any]]] = {}
    for line in (ROOT / "benchmarks" / "ledger" / "data.jsonl").read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        if not str(row.get("note", "")).startswith("over the "):
            found.setdefault(row["figure"], {})[row.get("peer")] = row
    return found


def table(of: dict[str, dict[str | None, dict[str, Any]]], rows: list[tuple[str, str, str]]) -> list[str]:
    """One class; a row is of the latest run that measured the figure, beside the earlier version where one did. Raises KeyError for a figure that the ledger lacks."""
    lines = ["| | before | now | peers in the same run | n | measured on |", "|---|---|---|---|---|---|"]
    for label, figure, data in rows:
        peers = of[figure]
        older = next((peers[name] for name in BEFORE if name in peers and figure not in _AGAIN), None)
        newest = older or max(peers.values(), key=lambda row: row["time"])
        before = _short(older["peer_value"]) if older else ""
        same = [row for row in peers.values() if row["commit"] == newest["commit"]]
        beside = [
            f"{row['peer']} {_short(row['peer_value'])}"
            for row in same
            if row.get("peer") and row["peer"] not in (*BEFORE, *_MINE)
        ]
        lines.append(
            f"| {label} | {before} | {_short(newest['value'])} | {', '.join(beside)} | {newest.get('n', '')} | {data} |"
        )
    return lines


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def page() -> str:
    """The page's text."""
    of = latest()
    lines = [
        "# Data: before and after, beside the peers",
        "",
        "Written by `python -m benchmarks.data_page` from `benchmarks/ledger/data.jsonl`. *Before* is commit b371072 measured on the same data;",
        "of decontamination it is its rule `ngrams`, of macrolanguages the identifier that names each language apart. What is not reached stands in",
        "[data.md](data.md#limits) and [languages.md](languages.md).",
    ]
    for name, rows in CLASSES.items():
        lines += ["", f"## {name}", *table(of, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
