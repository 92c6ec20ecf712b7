"""Writes the tables of docs/compression.md from the ledger: the text around them is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.compress import PRUNERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compression.md"


def rows() -> list[dict[str, Any]]:
    """The latest row of each method of benchmarks.quality, in the order of benchmarks/quality.yaml."""
    path = ROOT / "benchmarks" / "ledger" / "quality.jsonl"
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf8").splitlines() if path.exists() else ():
        row = json.loads(line)
        latest.pop((row["model"], row["method"]), None)
        latest[row["model"], row["method"]] = row
    order = [
        line.split("name: ")[1].split(",")[0].strip("\"'{} ")
        for line in Path(__file__).with_name("quality.yaml").read_text(encoding="utf8").splitlines()
        if line.startswith("- {name: ")
    ]
    found = [row for row in latest.values() if row["method"] in order]
    return sorted(found, key=lambda row: (row["model"], order.index(row["method"])))


def table() -> str:
    """Method, bits, perplexity, divergence, agreement and seconds of every row."""
    lines = [
        "| method | bits a weight, whole folder | perplexity | KL, nats | same top token | seconds | calibration seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    found = rows()
    if found:
        lines.append(f"| dense, bfloat16 | 16.00 | {found[0]['peer_value']:.3f} | 0 | 100 % | - | - |")
    for row in found:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.3f}"
        pruned = any(step["kind"] in PRUNERS or step.get("sparsity") for step in row["steps"])
        zeros = f", {100 * row['sparsity']:.0f} % zeros" if pruned else ""
        on_gpu = str(row["machine"].get("device", "")).startswith("cuda")
        seconds = f"{row['seconds']:.1f}" if on_gpu else "-"
        lines.append(
            f"| {row['method']} | {row['bits_per_weight']:.2f}{zeros} | {row['value']:.3f}{spread} | {row['kl']:.4f} | "
            f"{100 * row['top1']:.1f} % | {seconds} | {row['n'] if row['calibration'] != 'none' else '-'} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """`text` with the part between the two marks replaced by the table."""
    before, _, rest = text.partition("<!-- quality -->\n")
    _, mark, after = rest.partition("<!-- end -->")
    assert mark, f"{PAGE} lacks the marks of the table"
    return f"{before}<!-- quality -->\n{table()}\n{mark}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
