"""Draws a schedule over time: a line a rank, as text for a terminal and as SVG for the report."""

from __future__ import annotations

from markupsafe import Markup

from hone.parallel.pipeline.simulate import Played
from hone.report import svg

_CLASSES = {"F": "fall kept", "B": "fall lost", "I": "fall lost", "W": "fall whole", "S": "mark"}


def text(played: Played, width: int = 120) -> str:
    """A line a rank; the shortest pass takes up to three columns, fewer when the lines would pass `width`, and at least one.

    A pass shows its kind, F B I W S, then its microbatch, as far as its columns go; '·' is waiting.
    """
    spans = [span for row in played.spans for span in row if span.end > span.begin]
    shortest = min(span.end - span.begin for span in spans)
    unit = shortest / min(3, max(1, int(width * shortest / played.seconds)))
    lines = []
    for rank, row in enumerate(played.spans):
        columns = ["·"] * round(played.seconds / unit)
        for span in row:
            begin, end = round(span.begin / unit), round(span.end / unit)
            label = f"{span.op.kind}{span.op.microbatch if span.op.microbatch >= 0 else ''}"
            columns[begin:end] = list(label.ljust(end - begin)[: end - begin])
        lines.append(f"{rank:>3} {''.join(columns)}")
    return "\n".join(lines)


def picture(played: Played, name: str, width: float = 720) -> Markup:
    """The same as SVG: forwards, backwards, weight gradients and steps each in its color, a tooltip a pass."""
    scale = svg.Scale(0, played.seconds, 40, width - 4)
    rows = []
    for rank, row in enumerate(played.spans):
        top = 4.0 + 24 * rank
        rows.append(svg.text(4, top + 14, rank))
        for span in row:
            left, right = scale(span.begin), scale(span.end)
            inside = str(span.op.microbatch)
            label = svg.text((left + right) / 2, top + 14, inside, anchor="middle")
            fits = span.op.kind != "S" and svg.text_width(inside) <= right - left
            box = svg.rect(left, top, right - left - 0.5, 20, _CLASSES[span.op.kind], rx=1)
            rows.append(svg.group(str(span.op), box, label if fits else None))
    return svg.drawing(width, 8 + 24 * len(played.spans), f"pipeline schedule {name}", *rows)
