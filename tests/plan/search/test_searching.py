"""Searches: the front, its artifact and recipes, and what is said where nothing is found."""

from __future__ import annotations

import json

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.base.spec import read_yaml
from hone.cli.dispatch import main
from hone.plan.search import record
from hone.plan.search.exact import simulated
from hone.plan.search.goal import Goal
from hone.plan.search.searching import priced, search
from hone.recipe import Recipe
from tests.train.test_counts import packed

MODEL = {
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
    "max_seq_len": 128,
}
TINY = {
    "goal": "train", "model": MODEL, "vocab_size": 512, "batch_size": [8], "seq_len": 128, "tokens": ["100k", "1M"],
    "price_per_hour": 0.5,
}  # fmt: skip
LARGE = {
    "goal": "train", "model": {"smallest": "8B", "largest": "8B", "points": 1}, "machines": ["64xH100"], "tokens": ["10B"],
    "batch_size": [256], "seq_len": 4096, "price_per_hour": 2.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def large():
    return search(Goal.read(LARGE))


def test_the_first_row_is_the_best_of_all_that_fit(large):
    hours = [way.hours() for way in large.ways]
    assert large.ways and hours[0] == min(hours)
    assert all(way.evidence == "simulated" and way.train_bytes <= way.fleet.memory_bytes for way in large.ways)
    assert large.chosen.axes()["dollars"] == pytest.approx(hours[0] * 64 * 2)
    assert large.chosen.axes()["grams"] is None  # nothing is known of the grid
    assert large.chosen.half("hours") > 0 and large.chosen.half("loss") > 0


def test_every_configuration_is_counted(large):
    """What was kept of the axes' product and what was rejected, with its reason, are all of it."""
    tally = large.tally
    before = sum(
        count for reason, count in tally.rejected.items() if "limit" not in reason and "simulated" not in reason
    )
    assert before + tally.priced == tally.asked and tally.asked > 50_000


def test_a_better_configuration_is_not_left_out(large):
    """The bounds of a sample of rejected ways are not better than the first row by more than the error of closed forms."""
    ways, _ = priced(Goal.read(LARGE), large.fleets)
    best = min(ways, key=lambda way: way.train_hours)
    assert simulated(best, large.goal).train_hours >= 0.98 * large.chosen.train_hours


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of packed tokens, as a data stage writes it."""
    folder = tmp_path_factory.mktemp("data")
    return packed(folder, [120, 90, 200, 150, 300, 80] * 20, "stream")


def test_a_plan_is_an_artifact_with_a_recipe_for_each_row(tmp_path, data, capsys):
    goal = Goal.read({**TINY, "data": str(data)})
    found = search(goal, most=3)
    with record.opened(tmp_path / "plan", goal, Run(quiet=True)) as draft:
        record.written(found, draft)
    made = Artifact.read(tmp_path / "plan")
    front = json.loads((made.folder / "front.json").read_text())
    assert made.kind == "plan" and len(front["rows"]) == len(found.ways) <= 3
    assert front["machines"][0]["calibration"] and front["rejected"] and front["rows"][0]["why"]
    assert made.figures["hours"].how == "modelled" and made.figures["joules"].value is None
    assert Goal.load(made.folder / "goal.yaml") == goal
    again = record.opened(tmp_path / "plan", goal, Run(quiet=True))
    assert isinstance(again, Artifact)

    recipe = made.folder / front["rows"][0]["recipe"]
    (planned,) = Recipe.load(recipe).plan(tmp_path / "work")
    assert planned.name == "train-base" and planned.problem is None
    row = front["rows"][0]
    assert row["step_s"] == pytest.approx(8 * 128 / planned.plan.estimates["tokens_per_s"].value, rel=0.02)
    assert main(["plan", str(recipe), f"--work={tmp_path / 'work'}"]) == 0
    assert "train-base" in capsys.readouterr().out


def test_recipes_of_many_ranks_are_read_by_the_stage(large):
    """Each row's recipe, written and read again, is the training that was simulated."""
    from hone.train.stage import Train

    for number, way in enumerate(large.ways):
        recipe = way.recipe(large.goal, f"row-{number}")
        (entry,) = (one for one in recipe["stages"] if one["stage"] == "train")
        spec = Train.read({name: value for name, value in entry.items() if name not in ("stage", "name", "from")})
        assert spec.batch_size == way.train["batch_size"]
        assert spec.parallelism.degrees(64).tp == way.train["tensor"]


@pytest.mark.parametrize(
    ("limit", "name"), [({"deadline_h": 0.5}, "deadline"), ({"budget": 10.0}, "budget"), ({"memory": "3GB"}, "memory")]
)
def test_an_impossible_goal_says_what_binds_and_what_helps(limit, name):
    goal = Goal.read(
        {**LARGE, **limit, "machines": ["8xH100"], "space": {"tensor_parallel": [1], "context_parallel": [1]}}
    )
    found = search(goal)
    assert not found.ways and found.relaxed
    assert all(name in one.names for one in found.relaxed)
    if name != "memory":
        own = found.relaxed[0]
        assert own.way is not None and "->" in own.said
        assert search(Goal.read({**goal.model_dump(mode="json"), **own.changes}), most=1).ways


def test_the_command_prints_the_front_and_json(tmp_path, capsys):
    path = tmp_path / "goal.yaml"
    path.write_text(Goal.read(TINY).to_yaml())
    assert main(["plan", str(path), "--quiet", f"--out={tmp_path / 'plan'}"]) == 0
    said = capsys.readouterr().out
    assert "chosen: 1" in said and "configurations" in said and "mb " in said
    assert main(["plan", str(path), "--quiet", "--deadline_h=0.0000001", "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == [] and printed["relaxed"][0]["limits"] == ["deadline"]
    assert read_yaml(tmp_path / "plan" / "recipes" / "01.yaml")["line"] == "plan-1"
