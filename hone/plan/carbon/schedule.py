"""Plans the jobs of a file by the forecast, and says what the plan saves, what it adds and how far it is from perfect foresight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.base.errors import FitError
from hone.base.spec import dump_yaml
from hone.plan.carbon.exact import Optimum
from hone.plan.carbon.grid import Grid, Outcome, grids, spans_of
from hone.plan.carbon.groups import in_groups
from hone.plan.carbon.jobs import Schedule
from hone.plan.carbon.place import at_once, in_turns, total
from hone.plan.carbon.slots import Piece


@dataclass(frozen=True)
class Planned:
    """A plan: pieces by job, and outcomes with the true intensities beside those as forecast.

    `at_once` is what running without a plan would emit (None where it misses a deadline: `missed` says which), `foresight`
    what the same method would emit if it knew the truth. `gap` is how far the plan is above the optimum at most, as forecast.
    """

    grid: Grid
    truth: Grid
    placed: dict[str, list[Piece]]
    expected: dict[str, Outcome]
    true: dict[str, Outcome]
    at_once: dict[str, Outcome] | None
    foresight: dict[str, Outcome]
    gap: float
    missed: str = ""

    @property
    def regret(self) -> float:
        """Grams above those of perfect foresight over the latter."""
        return grams(self.true) / grams(self.foresight) - 1

    @property
    def saved(self) -> float | None:
        """Share of grams that the plan saves against running at once; None where that misses a deadline."""
        return None if self.at_once is None else 1 - grams(self.true) / grams(self.at_once)


def grams(outcomes: dict[str, Outcome]) -> float:
    """Grams of all jobs."""
    return sum(one.grams for one in outcomes.values())


def usd(outcomes: dict[str, Outcome]) -> float:
    """Dollars of all jobs."""
    return sum(one.usd for one in outcomes.values())


def place(grid: Grid) -> tuple[dict[str, list[Piece]], float]:
    """All jobs by the schedule's method, and by how much of the optimum this can be above it, at most."""
    if grid.spec.method == "exact":
        best = Optimum(grid)
        return best.placed, total(grid, best.placed) / best.bound - 1
    placed, bound = in_groups(grid) if grid.spec.method == "groups" else in_turns(grid)
    return placed, total(grid, placed) / bound - 1 if bound > 0 else float("inf")


def plan(spec: Schedule, folder: Path = Path()) -> Planned:
    """The plan of `spec`; paths in it are relative to `folder`. Raises FitError where a job cannot meet its deadline."""
    return plan_on(*grids(spec, folder))


def outcomes(spec: Schedule, folder: Path = Path()) -> dict[str, Outcome]:
    """What the plan of `spec` comes to with the true intensities, by job: `plan(spec, folder).true`, without the plans beside it."""
    expected, truth = grids(spec, folder)
    placed = place(expected)[0]
    return {job.name: truth.outcome(job, placed[job.name]) for job in expected.spec.jobs}


def plan_on(expected: Grid, truth: Grid) -> Planned:
    """The plan made with the grid `expected` and judged with `truth`."""
    placed, gap = place(expected)
    known = placed if (expected.grams == truth.grams).all() else place(truth)[0]
    jobs = {job.name: job for job in expected.spec.jobs}

    def come_to(grid: Grid, pieces: dict[str, list[Piece]]) -> dict[str, Outcome]:
        return {name: grid.outcome(jobs[name], pieces[name]) for name in jobs}

    try:
        agnostic, missed = come_to(truth, at_once(truth)), ""
    except FitError as error:
        agnostic, missed = None, error.what
    return Planned(
        expected, truth, placed, come_to(expected, placed), come_to(truth, placed), agnostic, come_to(truth, known), gap, missed
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A plan on the way from cheapest to cleanest: its price of carbon and share of the time to the deadlines."""

    usd_per_tonne: float | None
    share: float
    grams: float
    usd: float
    added_h: float


def front(spec: Schedule, folder: Path = Path(), prices: Sequence[float] = (0, 50, 200, 1000, 5000)) -> list[Point]:
    """Plans that no other beats in grams, dollars and added hours at once, over prices of carbon and earlier deadlines."""
    points = []
    for share in (0.25, 0.5, 0.75, 1.0):
        jobs = tuple(
            job.model_copy(update={"deadline": begin + (job.deadline - begin) * share})
            for job in spec.jobs
            for begin in [max(spec.start, job.arrival or spec.start)]
        )
        for price in (*prices, None):
            tried = spec.model_copy(update={"jobs": jobs, "usd_per_tonne": price})
            try:
                made = outcomes(tried, folder)
            except FitError:
                continue  # too early a deadline: no point of the front
            points.append(Point(price, share, grams(made), usd(made), sum(one.added_h for one in made.values())))
    kept: list[Point] = []
    for point in points:
        mine = (point.grams, point.usd, point.added_h)
        beaten = any(
            all(a <= b * (1 + 1e-9) + 1e-9 for a, b in zip(theirs, mine)) and theirs != mine
            for other in points
            for theirs in [(other.grams, other.usd, other.added_h)]
        )
        if not beaten and all((one.grams, one.usd, one.added_h) != mine for one in kept):
            kept.append(point)
    return sorted(kept, key=lambda one: one.grams)


def windows(made: Planned, job: str) -> list[dict[str, str | int]]:
    """When and where `job` runs: a mapping with start, end (ISO 8601) and site for each run without a break."""
    grid = made.grid
    workers = next(one for one in grid.spec.jobs if one.name == job).mode == "elastic"
    return [
        {
            "start": grid.at(begin / grid.step_h).isoformat(),
            "end": grid.at(end / grid.step_h).isoformat(),
            "site": grid.spec.sites[site].name,
            **({"workers": count} if workers else {}),
        }
        for begin, end, site, count in spans_of(made.placed[job], grid.step_h)
    ]


def write(made: Planned, folder: Path) -> list[Path]:
    """Writes NAME.yaml for each job into `folder`: the windows that a training run follows, with what the plan expects of them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for job in made.grid.spec.jobs:
        one = made.expected[job.name]
        values = {
            "job": job.name,
            "expected_grams": round(one.grams, 1),
            "expected_kwh": round(one.kwh, 4),
            "signal": made.grid.signal,
            "windows": windows(made, job.name),
        }
        paths.append(folder / f"{job.name}.yaml")
        paths[-1].write_text(dump_yaml(values), encoding="utf8")
    return paths
