"""Plans in a terminal: a table of stages with their estimates, what does not fit, and the ways out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.base.figure import Estimate, human_bytes, human_seconds
from hone.base.plan import DISK, PEAK

if TYPE_CHECKING:
    from hone.base.run import Run
    from hone.recipe import Planned

_COLUMNS = {"time_s": "time", PEAK: "memory", DISK: "disk", "energy_j": "energy"}


def show_plan(rows: Sequence[Planned], run: Run) -> int:
    """Prints a plan as a table, then what does not fit; returns the exit code: 2 when something does not."""
    from rich.console import Console
    from rich.table import Table

    from hone.measure.machine import machine_of

    machine = machine_of(run)
    table = Table(box=None, pad_edge=False, show_footer=len(rows) > 1, header_style="bold", footer_style="bold")
    totals = totals_of(rows)
    table.add_column("stage", footer="total", no_wrap=True)
    for name, title in _COLUMNS.items():
        table.add_column(title, footer=_cell(name, totals.get(name)), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        estimates = row.plan.estimates if row.plan else {}
        table.add_row(row.name, *(_cell(name, estimates.get(name)) for name in _COLUMNS), row.state)
    console = Console(highlight=False, quiet=not run.mesh.leads)
    # Names are printed whole, so that they can be copied: a narrow terminal breaks lines itself.
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    memory = human_bytes(machine.memory_bytes)
    ranks = f"{machine.num_ranks} ranks " if machine.num_ranks > 1 else ""
    cores = "" if machine.elsewhere else f", {machine.num_cores} cores"
    console.print(f"{ranks}on {machine.processor}{cores}, {memory} of memory\n", markup=False)
    console.print(table)
    if any(estimate.bound for row in rows if row.plan for estimate in row.plan.estimates.values()):
        console.print("\n\u2265: a limit of the hardware; no rate was measured for it")
    for row in rows:
        if row.plan and row.plan.notes:
            console.print("\n" + "\n".join(row.plan.notes), markup=False, soft_wrap=True)
    problems = [row for row in rows if row.problem is not None]
    for row in problems:
        what = row.problem.what if row.problem else ""
        console.print(f"\n{what if what.startswith(row.name) else f'{row.name}: {what}'}", markup=False, soft_wrap=True)
        for way in row.problem.fix.split("; or ") if row.problem else ():
            console.print(f"  - {way}", markup=False, soft_wrap=True)
    return 2 if problems else 0


def compact(rows: Sequence[Planned]) -> str:
    """A plan in one line: number of stages, time, memory and disk."""
    new = [row for row in rows if row.state != "there"]
    totals = totals_of(rows)
    parts = [f"{len(new)} stages to make" if new else "nothing to make"]
    if len(new) < len(rows):
        parts.append(f"{len(rows) - len(new)} exist")
    names = {"time_s": "", PEAK: " of memory at the peak", DISK: " of disk", "energy_j": ""}
    parts += [f"{_cell(name, totals[name])}{more}" for name, more in names.items() if name in totals]
    unknown = sum(row.plan is None for row in new)
    return f"plan: {', '.join(parts)}" + (f"; without {unknown} that cannot be planned yet" if unknown else "")


def totals_of(rows: Sequence[Planned]) -> dict[str, Estimate]:
    """Sums over the stages to make, the maximum of memory; a bound when a part of it is one."""
    found: dict[str, list[Estimate]] = {}
    for row in rows:
        for name, estimate in (row.plan.estimates if row.plan else {}).items():
            found.setdefault(name, []).append(estimate)
    return {
        name: found[name][0].model_copy(
            update={
                "value": (max if name == PEAK else sum)(one.value for one in found[name]),
                "bound": any(one.bound for one in found[name]),
            }
        )
        for name in _COLUMNS
        if name in found
    }


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    shown = human_bytes(estimate.value) if estimate.unit == "B" else human_seconds(estimate.value)
    if name == "energy_j":
        shown = f"{estimate.value:,.0f} J"
    return f"\u2265 {shown}" if estimate.bound else shown
