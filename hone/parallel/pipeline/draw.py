"""Draws a schedule over time: a line a rank, as text for a terminal and as what the report draws."""

from __future__ import annotations

from typing import Any

from hone.cost.pipeline.simulate import Played, Span
from hone.report.bars import PASSES, Pass


def text(played: Played, width: int = 120) -> str:
    """A line a rank; the shortest pass takes up to three columns, fewer when the lines would pass `width`, and at least one.

    A pass shows its kind, F B I W S, then its microbatch, an S the version that it makes, as far as its columns go; '·' is waiting. Of a rank with several
    stages every second one has small letters.
    """
    spans = [span for row in played.spans for span in row if span.end > span.begin]
    shortest = min(span.end - span.begin for span in spans)
    unit = shortest / min(3, max(1, int(width * shortest / played.seconds)))
    lines = []
    for rank, row in enumerate(played.spans):
        columns = ["·"] * round(played.seconds / unit)
        far = _far(row)
        for span in row:
            begin, end = round(span.begin / unit), round(span.end / unit)
            kind = span.op.kind.lower() if span.op.stage in far else span.op.kind
            label = f"{kind}{span.op.version if span.op.kind == 'S' else span.op.microbatch}"
            columns[begin:end] = list(label.ljust(end - begin)[: end - begin])
        lines.append(f"{rank:>3} {''.join(columns)}")
    return "\n".join(lines)


def legend(played: Played) -> str:
    """What the letters of `text` mean, of those that are in it."""
    there = {span.op.kind for row in played.spans for span in row}
    said = [f"{kind} {words}" for kind, words in PASSES.items() if kind in there]
    far = ["small letters: the rank's second stage"] if any(map(_far, played.spans)) else []
    return "; ".join(
        [", ".join(said), "then the micro-batch" + ", of S the version" * ("S" in there), *far, "· waiting"]
    )


def rows(played: Played) -> list[list[Pass]]:
    """The passes of each rank, as the report draws them."""
    found = []
    for row in played.spans:
        far = _far(row)
        found.append([
            Pass(span.op.kind, span.op.stage in far, span.op.microbatch, str(span.op), span.begin, span.end) for span in row
        ])  # fmt: skip
    return found


def content(played: Played, name: str) -> dict[str, Any]:
    """The same as JSON, for a training's folder: the report reads it."""
    return {"schedule": name, "seconds": played.seconds, "bubble": played.bubble, "ranks": rows(played)}


def _far(row: tuple[Span, ...]) -> set[int]:
    """Every second stage of a rank."""
    return set(sorted({span.op.stage for span in row})[1::2])
