"""A search in a terminal: the front, the chosen way, what binds, and how many configurations were rejected why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.figure import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from hone.plan.search.searching import Found
    from hone.plan.search.ways import Way

MOST_ROWS, MOST_REASONS = 12, 8


def show(found: Found, out: str | None) -> None:
    """Prints `found`; `out` is the folder in which it was kept, if it was."""
    from rich.console import Console

    console = Console(highlight=False)
    tally = found.tally
    console.print(
        f"{tally.asked:,} configurations, {tally.priced:,} priced in {found.search_s:.1f} s; "
        f"{len(found.ways)} on the front or within its error bars after simulation ({found.simulate_s:.1f} s)",
        soft_wrap=True,
    )
    for fleet in found.fleets:
        said = {
            "calibrated": "calibrated",
            "assumed": "assumed rates: a part of its data sheet",
            "bound": "bounds: not calibrated",
        }
        spread = f", times +- {fleet.spread:.0%}" if fleet.spread else ""
        console.print(
            f"  {fleet.label}: {fleet.machine.processor}, {said[fleet.rates]}{spread}", markup=False, soft_wrap=True
        )
    if found.ways:
        _front(found, console)
    else:
        _nothing(found, console)
    reasons = [(reason, count) for reason, count in tally.rejected.most_common() if count]
    console.print("\nrejected" if reasons else "\nnothing was rejected")
    for reason, count in reasons[:MOST_REASONS]:
        console.print(f"  {count:>12,}  {reason}", markup=False, soft_wrap=True)
    if len(reasons) > MOST_REASONS:
        console.print(
            f"  {sum(count for _, count in reasons[MOST_REASONS:]):>12,}  for {len(reasons) - MOST_REASONS} other reasons"
        )
    for note in found.notes:
        console.print(f"\n{note}", markup=False, soft_wrap=True)
    if out is not None and found.ways:
        console.print(
            f"\nkept in {out}; hone run {out}/recipes/01.yaml makes the chosen one", markup=False, soft_wrap=True
        )


def _front(found: Found, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    served = any(way.tpot_s is not None for way in found.ways)
    for title in ("", "machine", "model", "configuration"):
        table.add_column(title, no_wrap=True)
    for title in ("time", "$", "kWh", "kg CO2", "loss", *(["TTFT", "TPOT"] if served else []), "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("kept because", no_wrap=True)
    for number, way in enumerate(found.ways[:MOST_ROWS], 1):
        table.add_row(*_cells(number, way, served))
    console.print()
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    more = len(found.ways) - MOST_ROWS
    if more > 0 or found.overlapping:
        console.print(f"and {max(more, 0) + found.overlapping:,} others within the error bars of the front")
    chosen = found.ways[0]
    weights = ", ".join(f"{axis} x {weight:g}" for axis, weight in found.goal.weights.items() if weight)
    console.print(f"\nchosen: 1, least in {weights} together ({chosen.evidence})", soft_wrap=True)
    if chosen.step_s is not None:
        console.print(f"  a step: {step_said(chosen)}", markup=False, soft_wrap=True)
    for name, value in chosen.measured.items():
        console.print(f"  {name}: {value:.4g}")


def step_said(way: Way) -> str:
    """What one optimizer step of a training takes of everything."""
    assert way.step_s is not None and way.train is not None, "a training has steps"
    hours = way.step_s / 3600
    parts = [human_seconds(way.step_s)] if way.fleet.spread is not None else [f"\u2265 {human_seconds(way.step_s)}"]
    for value, text in (
        (way.fleet.dollars(hours), lambda value: f"${value:,.3g}"),
        (way.fleet.joules(hours), lambda value: f"{value / 1e6:,.4g} MJ"),
        (way.fleet.grams(hours), lambda value: f"{value:,.4g} g CO2"),
    ):
        parts += [] if value is None else [text(value)]
    return f"{', '.join(parts)}, {human_bytes(way.train_bytes or 0.0)} of a device"


def _cells(number: int, way: Way, served: bool) -> list[str]:
    axes = way.axes()
    tokens = f" {way.train['tokens'] / 1e9:.4g}B tokens" if way.train else ""
    cells = [str(number), way.fleet.label, f"{way.candidate.name}{tokens}", way.label()]
    cells.append(_said(axes["hours"], way.half("hours"), lambda hours: human_seconds(3600 * hours), way))
    cells.append(_said(axes["dollars"], None, lambda value: f"{value:,.2f}" if value < 100 else f"{value:,.0f}", way))
    cells.append(_said(axes["joules"], None, lambda value: f"{value / 3.6e6:,.3g}", way))
    cells.append(_said(axes["grams"], None, lambda value: f"{value / 1e3:,.3g}", way))
    half = way.half("loss")
    cells.append("unknown" if axes["loss"] is None else f"{axes['loss']:.3f}" + (f" \u00b1 {half:.3f}" if half else ""))
    if served:
        cells += ["" if one is None else f"{one * 1e3:.3g} ms" for one in (way.ttft_s, way.tpot_s)]
    return [*cells, human_bytes(way.memory_bytes), way.why]


def _said(value: float | None, half: float | None, text: Callable[[float], str], way: Way) -> str:
    """A cell: `unknown`, a bound with its sign, or a value with its relative half-width."""
    if value is None:
        return "unknown"
    shown = f"{text(value)}"
    if way.fleet.spread is None:
        return f"\u2265 {shown}"
    return shown + (f" \u00b1 {half / value:.0%}" if half and value else "")


def _nothing(found: Found, console: Console) -> None:
    console.print("\nno configuration keeps all limits. What each would have to be:")
    for one in found.relaxed:
        verified = (
            "not enough, by a search"
            if one.way is None
            else f"verified: {one.way.fleet.label}, {one.way.candidate.name}, {one.way.label()}"
        )
        console.print(f"  - {one.said} ({verified})", markup=False, soft_wrap=True)
    if not found.relaxed:
        console.print("  - no configuration can be combined at all: see the reasons below")
