"""Draws running trainings: one HTML fragment of their numbers, curves and ranks, for a page of a given width."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup, escape

from hone.report import units
from hone.report.charts import smooth, thin
from hone.report.live.reading import RunLog
from hone.report.svg import Scale, dot, drawing, fit, group, padded_domain, path, rect, text, text_width, x_axis, y_axis

NARROW, WIDE = 300.0, 1080.0
"""Widths that are drawn, in pixels; a page asks for its own."""
COLORS = 6
"""Runs whose curves have a color of their own; further ones begin again."""
MOST_RANKS = 16
"""Ranks that have a bar; of more those whose own work takes longest."""
CURVES = (
    ("loss", "Loss", "nats a token", ""),
    ("lr", "Learning rate", "", ""),
    ("grad_norm", "Norm of the gradient", "", ""),
    ("tokens_per_s", "Tokens a second", "", ""),
    ("memory_bytes", "Memory of rank 0", "", "B"),
    ("expert_load", "Busiest expert", "times the mean of its layer", ""),
    ("expert_drops", "Visits to experts dropped", "share", ""),
    ("router_entropy", "Entropy of routers", "nats", ""),
)
"""The curves: name in the logs, title, what it is in, unit of its axis."""


def fragment(runs: Sequence[RunLog], width: float) -> str:
    """The body of the page for `runs`, whose panels are `width` pixels wide. Every text is escaped."""
    width = min(max(width, NARROW), WIDE)
    parts = [_head(place, run) for place, run in enumerate(runs)]
    wide, half = width - 46, (width - 16) / 2 - 46 if width > 700 else width - 46
    drawn = []
    for name, title, said, unit in CURVES:
        room = wide if name == "loss" else half
        chart = _chart(runs, name, title, unit, room)
        if chart is not None:
            note = f' <span class="aside">{escape(said)}</span>' if said else ""
            drawn.append(Markup('<div class="panel"><h3>{}{}</h3>{}</div>').format(title, Markup(note), chart))
    if drawn:
        parts.append(Markup('{}<div class="halves">{}</div>').format(drawn[0], Markup("").join(drawn[1:])))
    parts += [_ranks(place, run, wide, len(runs) > 1) for place, run in enumerate(runs) if run.ranks is not None]
    return str(Markup("\n").join(parts))


def _head(place: int, run: RunLog) -> Markup:
    """A run's name, its state, and its newest numbers."""
    mark = Markup('<span class="swatch r{}"></span>').format(place % COLORS)
    if run.state == "waiting":
        state = Markup("waiting for the first step in <code>{}</code>").format(run.folder)
    else:
        share = f" of {run.total:,}" if run.total else ""
        done = "done, " if run.state == "done" else ""
        state = Markup("{}step {}{}").format(done, f"{run.step:,}", share)
        if run.written_at is not None and run.state == "running":
            at = time.strftime(
                "on %d %B at %H:%M UTC", time.gmtime(run.written_at)
            )  # the page's script says how long ago
            state += Markup(', written <time data-at="{}">{}</time>').format(f"{run.written_at:.1f}", at)
    if run.garbage:
        lines = "1 line" if run.garbage == 1 else f"{run.garbage} lines"
        state += Markup('; <span class="bad">{} of its logs cannot be read</span>').format(lines)
    bar = Markup("")
    if run.total and run.state != "waiting":
        bar = Markup('<progress max="{}" value="{}"></progress>').format(run.total, min(run.step, run.total))
    items = [Markup("<li><b>{}</b><span>{}</span></li>").format(value, name) for value, name in _numbers(run)]
    listed = Markup('<ul class="findings numbers">{}</ul>').format(Markup("").join(items)) if items else ""
    return Markup('<section class="run"><h2>{}{}</h2><p class="lead">{}</p>{}{}</section>').format(
        mark, run.name, state, bar, listed
    )


def _numbers(run: RunLog) -> list[tuple[str, str]]:
    """(value, what it is) of what is known."""
    shown: list[tuple[str, str, Callable[[float], str]]] = [
        ("loss", "training loss", lambda value: units.three(value, 4)),
        ("val_loss", "validation loss", lambda value: units.three(value, 4)),
        ("lr", "learning rate", lambda value: f"{value:.2e}"),
        ("grad_norm", "norm of the gradient", units.three),
        ("tokens_per_s", "tokens a second", lambda value: f"{value:,.0f}"),
        ("mfu", "MFU, causal attention halved", lambda value: f"{value:.1%}"),
        ("mfu_full_attention", "MFU, attention counted in full", lambda value: f"{value:.1%}"),
        ("memory_bytes", "memory of rank 0", lambda value: units.show(value, "B")),
        ("joules_per_token", "joules a token", units.three),
        ("expert_load", "busiest expert / mean", lambda value: f"{value:.2f}"),
    ]
    return [(form(value), words) for name, words, form in shown if (value := run.last(name)) is not None]


def _chart(runs: Sequence[RunLog], name: str, title: str, unit: str, width: float) -> Markup | None:
    """One curve of every run over the steps; of a loss each step faintly, its running mean, and validation losses as dots."""
    lines = [(place, run.series[name].points) for place, run in enumerate(runs) if name in run.series]
    lines = [(place, points) for place, points in lines if points]
    if not lines:
        return None
    is_loss = name == "loss"
    dots = [
        (place, run.series["val_loss"].points) for place, run in enumerate(runs) if is_loss and "val_loss" in run.series
    ]
    height = 280.0 if is_loss else 190.0
    left, right, top, bottom = 58.0, 22.0, 12.0, 34.0
    xs = [x for _, points in lines + dots for x, _ in points]
    ys = [y for _, points in lines + dots for _, y in points]
    x = Scale(min(xs), max(max(xs), min(xs) + 1), left, width - right)
    # Beside the first steps of a loss the others would be a line at the bottom: the highest hundredth is cut off.
    high = sorted(ys)[int(len(ys) * 0.99)] if len(ys) > 200 else max(ys)
    y = Scale(*padded_domain([min(ys), high], log=False, pad=0.05, least=0.02), height - bottom, top)
    count = max(2, int((width - left) / 110))
    parts: list[Any] = [y_axis(y, left, width - right, unit=unit, count=5), x_axis(x, height - bottom, count=count)]
    parts.append(text(width - right, height - 4, "step", "tick", "end"))

    def at(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x(a), y(min(max(b, y.low), y.high))) for a, b in thin(list(points), 600)]

    for place, points in lines:
        color = f"r{place % COLORS}"
        if name not in ("lr", "memory_bytes") and len(points) > 20:
            parts.append(path(at(points), f"line faint {color}"))
            points = smooth(points, max(3, len(points) // 40))
        parts.append(path(at(points), f"line {color}") if len(points) > 1 else dot(*at(points)[0], 3, f"mark {color}"))
    for place, points in dots:
        for (px, py), (step, value) in zip(at(points), thin(list(points), 600), strict=True):
            said = f"{runs[place].name}, step {step:.0f}: validation loss {value:.4f}"
            parts.append(group(said, dot(px, py, 3, f"mark {'val' if len(runs) == 1 else f'r{place % COLORS}'}")))
    said = f"{title} over the steps: " + "; ".join(
        f"{runs[place].name} {units.three(points[-1][1], 4)} at step {points[-1][0]:.0f}" for place, points in lines
    )
    return drawing(width, height, said, *parts)


def _ranks(place: int, run: RunLog, width: float, named: bool) -> Markup:
    """A bar for each rank's step: its own work, and its waits for others."""
    assert run.ranks is not None, "only for runs on several ranks"
    busy, wait = run.ranks["busy_s"], run.ranks["wait_s"]
    chosen = sorted(sorted(range(len(busy)), key=lambda rank: -busy[rank])[:MOST_RANKS])
    longest = max(one + other for one, other in zip(busy, wait, strict=True)) or 1.0
    sayings = [f"{units.three(busy[rank])} s + {units.three(wait[rank])} s" for rank in chosen]
    left, room = 62.0, max(text_width(one, 13) for one in sayings) + 14
    per_s = max(width - left - room, 40.0) / longest
    parts: list[Any] = []
    for row, (rank, saying) in enumerate(zip(chosen, sayings, strict=True)):
        top = row * 26.0
        own, idle = busy[rank] * per_s, wait[rank] * per_s
        title = f"rank {rank}: {busy[rank]} s of its own work, {wait[rank]} s waiting"
        bars = (rect(left, top + 4, own, 15, "bar strong"), rect(left + own, top + 4, idle, 15, "band"))
        parts.append(
            group(
                title,
                text(left - 8, top + 16, f"rank {rank}", "barlabel", "end"),
                *bars,
                text(left + own + idle + 8, top + 16, saying, "barvalue"),
            )
        )
    more = f", of {len(busy)} the {len(chosen)} that take longest" if len(chosen) < len(busy) else ""
    where = f" of {run.name}" if named else ""
    said = f"Step {run.ranks['step']:.0f}{more}: dark, a rank's own work; light, its waits for others."
    chart = drawing(width, len(chosen) * 26.0 + 4, f"Times of the ranks{where}. {said}", *parts)
    title = fit(f"Ranks{where}", width, 16)
    return Markup('<div class="panel"><h3>{}</h3>{}<p class="fine">{}</p></div>').format(title, chart, said)
