"""The recipes that are shipped can be planned before anything exists, as docs/plans.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base.run import Run
from hone.recipe import Planned, Recipe
from hone.train.continuation.start import Start
from hone.train.stage import TrainPlan
from tests.train.conftest import write_data

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize(
    "name", ["case_study", "curation", "sft", "tiny", "verification"]
)  # the others begin with what tiny made
def test_a_shipped_recipe_is_planned_before_anything_exists(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = {row.name: row for row in Recipe.load(RECIPES / f"{name}.yaml").plan("elsewhere", Run(quiet=True))}
    assert {row.name: row.problem.what for row in planned.values() if row.problem is not None} == {}
    if name == "curation":  # one arm takes the tokenizer of the other, which no plan has made yet
        assert planned["data-raw"].state == "waits for data-curated"
        assert planned["train-raw-0"].state == "waits for data-raw" and planned["train-curated-0"].plan is not None
    if name == "verification":
        begin_alike(planned, 3)  # the controls: their candidates are not planned before there is a tokenizer


def test_every_round_of_a_lottery_ticket_and_its_control_read_the_same_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "work/tiny/data-text")
    rows = Recipe.load(RECIPES / "lottery_ticket.yaml").plan("work", Run(quiet=True))
    begin_alike({row.name: row for row in rows}, 9)


def begin_alike(planned: dict[str, Planned], count: int) -> None:
    """All `count` trainings that go on from a model, of every seed, read their data from the start."""
    plans = [row.plan for row in planned.values() if isinstance(row.plan, TrainPlan)]
    assert len(plans) == count + 1, "those and the one that made the model"
    assert all(plan.start == Start() for plan in plans)
