"""Writes docs/techniques.md: every technique with slot, paper, file and its figures of the ledger."""

from __future__ import annotations

import json
from pathlib import Path

from hone.base.table import all_tables

ROOT = Path(__file__).resolve().parent.parent


def page() -> str:
    """The page's text, from the slots' tables and the ledger."""
    figures: dict[str, list[str]] = {}
    for path in sorted((ROOT / "benchmarks" / "ledger").glob("*.jsonl")):
        latest: dict[tuple[str, str], dict] = {}
        for line in path.read_text(encoding="utf8").splitlines():
            row = json.loads(line)
            if row.get("technique") and row.get("value") is not None:
                latest[row["technique"], row["figure"]] = row
        for (technique, _), row in latest.items():
            peer = (
                f" ({row['peer']}: {row['peer_value']:.4g})"
                if row.get("peer") and row.get("peer_value") is not None
                else ""
            )
            figures.setdefault(technique, []).append(f"{row['figure']} {row['value']:.4g} {row.get('unit', '')}{peer}")
    lines = [
        "# Techniques",
        "",
        "One row per technique; each is one file. Written by `python -m benchmarks.techniques_page` from the slots' tables;",
        "figures are the latest of `benchmarks/ledger/`.",
    ]
    for slot, table in all_tables().items():
        if not table.rows:
            continue
        sized = any(getattr(table[name], "complexity", "") for name in table)
        heads = ["name", "what it does", "paper", *(["work for S tokens"] if sized else []), "file", "measured"]
        lines += ["", f"## {slot}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for name in table:
            cls = table[name]
            summary = (cls.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")
            file = cls.__module__.replace(".", "/") + ".py"
            measured = "; ".join(figures.get(f"{slot}/{name}", [])) or "-"
            work = f" {cls.complexity} |" if sized else ""
            lines.append(f"| `{name}` | {summary} | {cls.paper or '-'} |{work} [{file}](../{file}) | {measured} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "techniques.md").write_text(page(), encoding="utf8")
