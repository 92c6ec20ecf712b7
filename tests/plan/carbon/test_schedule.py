"""Schedules on the shipped year: against the exact optimum, with forecasts, published savings, messages and files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import FitError, SpecError
from hone.base.spec import dump_yaml
from hone.cli.dispatch import main
from hone.cost.carbon.intensity import shipped
from hone.plan.carbon.advice import advise, of_schedule
from hone.plan.carbon.exact import Optimum
from hone.plan.carbon.grid import grids
from hone.plan.carbon.groups import in_groups
from hone.plan.carbon.jobs import Job, Schedule, Site, windows_of
from hone.plan.carbon.place import capacity, take, total
from hone.plan.carbon.schedule import front, grams, plan, plan_on, windows
from hone.plan.carbon.slots import Slots, whole

START = datetime(2020, 3, 2, 9, tzinfo=UTC)
SITES = (Site(name="DE", devices=3), Site(name="GB", devices=2), Site(name="FR", devices=1))


def week(count: int = 8, **fields: object) -> Schedule:
    """Jobs of a week that want the same clean hours of a few devices, reproducible."""
    draw = np.random.default_rng(7)
    jobs = []
    for place in range(count):
        arrival = START + timedelta(hours=int(draw.integers(0, 96)))
        hours = int(draw.integers(2, 20))
        jobs.append(
            Job(name=f"j{place}", hours=hours, power_kw=float(draw.uniform(1, 6)), arrival=arrival,
                deadline=arrival + timedelta(hours=hours + int(draw.integers(12, 48))), mode="whole" if place % 3 == 0 else "interruptible")
        )  # fmt: skip
    return Schedule(start=START, sites=SITES, jobs=tuple(jobs), **fields)


@pytest.mark.parametrize(("site", "saving"), [("DE", 0.138), ("GB", 0.089), ("FR", 0.068)])
def test_an_hour_at_one_in_the_morning_saves_little(site: str, saving: float):
    """1 h of work at 01:00, eight hours earlier or later, every night of 2020, with perfect foresight, from the half hours of
    the package."""
    values = shipped(site).values
    usual = best = 0.0
    for day in range(366):
        at = day * 48 + 2
        first, last = max(0, at - 16), min(len(values), at + 18)
        cost = values[None, first:last]
        found = whole(Slots(cost, 0.5), 1.0)
        best += sum(cost[0, one.slot] for one in found)
        usual += values[at] + values[at + 1]
    assert 1 - best / usual == pytest.approx(saving, abs=0.0006)


def test_placing_in_groups_is_near_the_exact_optimum():
    expected, _ = grids(week(6))
    placed, bound = in_groups(expected)
    optimum = Optimum(expected)
    assert optimum.proven
    assert bound <= optimum.value * (1 + 1e-9) and bound >= 0.97 * optimum.value
    assert optimum.value * (1 - 1e-6) <= total(expected, placed) <= 1.03 * optimum.value
    room = capacity(expected)
    for job in expected.spec.jobs:
        take(room, job, placed[job.name])
        first, last = expected.span(job)
        slots = [one.slot for one in placed[job.name]]
        assert first <= min(slots) and max(slots) < last
        assert sum(one.hours for one in placed[job.name]) == pytest.approx(job.hours)
        if job.mode == "whole":
            assert slots == [*range(slots[0], slots[0] + len(slots))]
    assert (room >= 0).all()


def test_regret_is_against_perfect_foresight():
    made = plan(week(4, forecast="yesterday", method="exact"))
    assert made.regret >= -1e-6 and grams(made.true) > 0
    assert grams(made.expected) != grams(made.true)
    assert plan(week(4, method="exact")).regret == 0.0
    assert made.saved is not None and 0 < made.saved < 1


def test_a_front_has_no_beaten_plan():
    sites = tuple(site.model_copy(update={"usd_per_kwh": usd}) for site, usd in zip(SITES, (0.1, 0.15, 0.4)))
    points = front(week(5).model_copy(update={"sites": sites}), prices=(0, 200))
    assert len(points) > 2
    for one in points:
        assert not any(
            other.grams < one.grams and other.usd < one.usd and other.added_h < one.added_h for other in points
        )
    cleanest, cheapest = points[0], min(points, key=lambda one: one.usd)
    assert cleanest.grams < cheapest.grams and cleanest.usd > cheapest.usd


def test_advice_is_planned_again():
    spec = week(6)
    found = of_schedule(spec)
    more = next(one for one in found if one.change == "sites with devices for all jobs at once")
    free = spec.model_copy(update={"sites": tuple(Site(name=site.name) for site in SITES)})
    assert more.value == pytest.approx(grams(plan(free).true))
    assert more.saved == pytest.approx(1 - more.value / grams(plan(spec).true)) and more.saved > 0

    def impossible() -> tuple[float, str]:
        raise FitError("too large", fix="smaller")

    assert [(one.change, one.saved) for one in advise(10.0, {"a": impossible, "b": lambda: (8.0, "b")})] == [
        ("b", pytest.approx(0.2)),
        ("a", None),
    ]


def test_what_cannot_be_is_said():
    late = Job(name="late", hours=5, power_kw=1, deadline=START + timedelta(hours=4))
    with pytest.raises(FitError, match="job late needs 5 h and has 4 h"):
        plan(Schedule(start=START, sites=SITES, jobs=(late,)))
    crowd = tuple(
        Job(name=f"c{k}", hours=5, power_kw=1, deadline=START + timedelta(hours=6), sites=("FR",)) for k in range(2)
    )
    with pytest.raises(FitError, match="finds too little room"):
        plan(Schedule(start=START, sites=SITES, jobs=crowd))
    moving = Job(name="m", hours=5, power_kw=1, deadline=START + timedelta(hours=60), checkpoint="9TB")
    with pytest.raises(SpecError, match="a move of 120 minutes is no shorter than a slot"):
        plan(Schedule(start=START, sites=SITES, jobs=(moving,)))
    with pytest.raises(SpecError, match="neither a site of the package nor a file"):
        plan(Schedule(start=START, sites=(Site(name="XX"),), jobs=(late,)))
    with pytest.raises(SpecError, match="give power_kw or energy_kwh"):
        Job.read({"name": "a", "hours": 1, "deadline": "2020-01-01"})
    with pytest.raises(SpecError, match="add no more than the one before"):
        Job.read(
            {
                "name": "a",
                "hours": 1,
                "power_kw": 1,
                "deadline": "2020-01-01",
                "mode": "elastic",
                "speedups": [1, 1.5, 2.5],
            }
        )


def test_averages_and_marginals_are_not_mixed(tmp_path: Path):
    path = tmp_path / "marginal.csv"
    rows = [f"{START + timedelta(hours=hour):%Y-%m-%dT%H:%M},{400 + hour}" for hour in range(48)]
    path.write_text("\n".join(["time,marginal", *rows]))
    job = Job(name="a", hours=5, power_kw=1, deadline=START + timedelta(hours=12))
    with pytest.raises(SpecError, match=r"DE has average intensities .* and CA marginal"):
        plan(
            Schedule(start=START, sites=(Site(name="DE"), Site(name="CA", intensity=path.name)), jobs=(job,)), tmp_path
        )


def test_windows_cover_the_work():
    spec = week(6)
    made = plan_on(*grids(spec))
    for job in spec.jobs:
        spans = [
            (datetime.fromisoformat(str(one["start"])), datetime.fromisoformat(str(one["end"])))
            for one in windows(made, job.name)
        ]
        assert sum((end - begin).total_seconds() for begin, end in spans) / 3600 == pytest.approx(job.hours)
        assert spans[0][0] >= job.arrival and spans[-1][1] <= job.deadline
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "jobs.yaml"
    job = {"name": "train", "hours": 6, "power_kw": 5.6, "deadline": "2020-03-04T09:00", "sites": ["GB", "FR"]}
    path.write_text(dump_yaml({"start": "2020-03-02T09:00", "sites": [{"name": "GB"}, {"name": "FR"}], "jobs": [job]}))
    assert main(["schedule", str(path), f"--out={tmp_path / 'out'}", "--advice"]) == 0
    printed = capsys.readouterr().out
    assert "modelled with average intensities" in printed and "regret against perfect foresight" in printed
    assert "deadlines a day later" in printed
    found = windows_of(tmp_path / "out" / "train.yaml")
    assert {one["site"] for one in found} == {"FR"} and {*found[0]} == {"start", "end", "site"}
    path.write_text(dump_yaml({"start": "2020-03-02T09:00", "sites": [{"name": "GB"}], "jobs": [job]}))
    assert main(["schedule", str(path)]) == 2
    assert "may run at 'FR', which is no site" in capsys.readouterr().err


def test_the_example_of_the_docs_is_planned(tmp_path: Path):
    text = (Path(__file__).parents[3] / "docs" / "carbon.md").read_text(encoding="utf8")
    (tmp_path / "jobs.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    made = plan(Schedule.load(tmp_path / "jobs.yaml").model_copy(update={"method": "list"}))
    assert made.saved is not None and made.saved > 0.5 and -0.02 < made.regret < 0.2
    assert {one["site"] for one in windows(made, "finetune")} == {"DE"}
    assert all("workers" in one for one in windows(made, "sweep"))
