"""The verb `schedule`: reads a file of jobs and sites, prints the plan beside running at once, writes windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.cli.options import at_most, need, only

if TYPE_CHECKING:
    from hone.plan.carbon.schedule import Planned

OF_SCHEDULE = ("out", "front", "advice")
_USAGE = """usage: hone schedule JOBS.yaml [--out=FOLDER] [--front] [--advice]

Chooses hours and sites for jobs before their deadlines such that they emit the least, by the sites' carbon intensities over
time, and prints what that saves against running at once and how far it is from perfect foresight.
  --out=FOLDER   write NAME.yaml for each job: its windows, for a run to follow
  --front        the plans between cheapest, cleanest and soonest, over prices of carbon and earlier deadlines
  --advice       changes of deadlines, modes and sites, each planned again, with what it saves"""


def schedule(words: list[str], options: dict[str, str]) -> int:
    """Prints the plan of a file; returns 0."""
    from hone.cli.options import list_fields
    from hone.plan.carbon.advice import of_schedule
    from hone.plan.carbon.jobs import Job, Schedule, Site
    from hone.plan.carbon.schedule import front, plan, write

    if "help" in options:
        print(_USAGE)
        for cls, title in ((Schedule, "fields of the file"), (Site, "of each of sites"), (Job, "of each of jobs")):
            print(f"\n{title}:\n{list_fields(cls).replace('--', '')}")
        return 0
    only(words, options, OF_SCHEDULE)
    at_most(words, 1, "one JOBS.yaml")
    path = Path(need(words, "JOBS.yaml"))
    spec = Schedule.load(path)
    made = plan(spec, path.parent)
    _print_plan(made)
    if "front" in options:
        _print_rows(
            "\ncarbon, price and waiting: no plan is better in all three",
            ("$ a tonne", "deadlines at", "kg CO2e", "$", "hours added"),
            [
                ("carbon alone" if one.usd_per_tonne is None else f"{one.usd_per_tonne:g}", f"{one.share:.0%}",
                 f"{one.grams / 1000:,.2f}", f"{one.usd:,.2f}", f"{one.added_h:,.1f}")
                for one in front(spec, path.parent)
            ],
        )  # fmt: skip
    if "advice" in options:
        _print_rows(
            "\nadvice: each change planned again",
            ("change", "saves", "evidence"),
            [
                (one.change, "impossible" if one.saved is None else f"{one.saved:.1%}", one.evidence)
                for one in of_schedule(spec, path.parent, made)
            ],
        )
    if "out" in options:
        for written in write(made, Path(options["out"])):
            print(f"wrote {written}")
    return 0


def _print_plan(made: Planned) -> None:
    from hone.plan.carbon.schedule import grams, usd, windows

    rows: list[tuple[str, ...]] = []
    for job in made.grid.spec.jobs:
        one, when = made.true[job.name], windows(made, job.name)
        before = "missed" if made.at_once is None else f"{made.at_once[job.name].grams / 1000:,.2f}"
        shown = f"{when[0]['start'][:16]} {when[0]['site']}"  # type: ignore[index]
        rows.append(
            (job.name, shown, f"{one.finish:%m-%d %H:%M}", str(len(when)), str(one.moves), f"{one.kwh:,.1f}", before,
             f"{made.expected[job.name].grams / 1000:,.2f}", f"{one.grams / 1000:,.2f}", f"{one.usd:,.2f}", f"{one.added_h:+,.1f}")
        )  # fmt: skip
    _print_rows(
        f"modelled with {made.grid.signal} intensities; times are UTC",
        (
            "job",
            "first window",
            "end",
            "windows",
            "moves",
            "kWh",
            "kg at once",
            "kg forecast",
            "kg true",
            "$",
            "hours added",
        ),
        rows,
    )
    total = grams(made.true)
    saved = f"not known: {made.missed}" if made.saved is None else f"{made.saved:.1%} less than running at once"
    print(f"\ntotal {total / 1000:,.2f} kg CO2e, {saved}; ${usd(made.true):,.2f}")
    print(
        f"regret against perfect foresight by the same method: {made.regret:.2%} ({grams(made.foresight) / 1000:,.2f} kg)"
    )
    print(f"as forecast, no other placement is more than {max(made.gap, 0):.2%} better (by a lower bound)")
    for source in dict.fromkeys(made.grid.sources):
        print(f"intensities: {source}")


def _print_rows(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    print(title)
    console.print(table)
