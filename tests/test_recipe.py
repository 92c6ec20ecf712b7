"""Recipes: branches, references, overrides, redo and what follows from it."""

import os
import signal

import pytest
import yaml
from pydantic import Field

from hone.base import stage as stage_module
from hone.base.durable import read_jsonl, write_jsonl
from hone.base.errors import DriftError, FitError, SpecError
from hone.base.figure import Estimate
from hone.base.plan import DISK, Facts, Plan, need
from hone.base.run import Interrupted, Run
from hone.base.stage import Stage
from hone.cli import main
from hone.recipe import Recipe

MADE: list[str] = []


class Text(Facts):
    """A text of so many letters."""

    noun, mark = "text", "x.jsonl"
    letters: int

    @classmethod
    def of(cls, folder):
        return cls(where=str(folder), letters=len(read_jsonl(folder / cls.mark)[0]["text"]))


class Plant(Facts):
    """What has grown."""

    noun, mark = "plant", "y.jsonl"
    height: int

    @classmethod
    def of(cls, folder):
        return cls(where=str(folder), height=read_jsonl(folder / cls.mark)[0]["steps"])


def taking(seconds: float, disk: float, facts: Facts) -> Plan:
    """A plan of a stage that takes so much."""
    time_s = Estimate(value=seconds, unit="s")
    return Plan(estimates={"time_s": time_s, DISK: Estimate(value=disk, unit="B")}, facts=facts)


class Write(Stage):
    """Writes."""

    stage = "data"
    text: str = Field("a", description="Text.")

    def plan(self, facts, machine):
        return taking(1, 100, Text(where="", letters=len(self.text)))

    def run(self, plan, draft, parents, run):
        MADE.append(draft.target.name)
        write_jsonl(draft.folder / "x.jsonl", [{"text": self.text}])
        draft.record("time_s", 0.5, "s")


class Grow(Stage):
    """Grows."""

    stage = "train"
    roles = {"data": True, "teacher": False}  # noqa: RUF012
    steps: int = Field(1, description="Steps.")
    seed: int = Field(0, description="Seed.")

    def plan(self, facts, machine):
        letters = need(facts, "data", Text).letters
        if "teacher" in facts:
            need(facts, "teacher", Plant)
        return taking(self.steps * letters, 1e21 if self.steps > 99 else 10, Plant(where="", height=self.steps))

    def run(self, plan, draft, parents, run):
        MADE.append(draft.target.name)
        write_jsonl(draft.folder / "y.jsonl", [{"steps": self.steps}])
        draft.record("time_s", 0.5, "s")


@pytest.fixture(autouse=True)
def stages(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(stage_module, "STAGES", {})
    rows = {"data": "tests.test_recipe:Write", "train": "tests.test_recipe:Grow"}
    monkeypatch.setattr("hone.recipe.STAGES", rows)
    facts = {"text": "tests.test_recipe:Text", "plant": "tests.test_recipe:Plant"}
    monkeypatch.setattr("hone.base.plan.FACTS", facts)


ENTRIES = [
    {"stage": "data", "name": "text", "text": "hello"},
    {"stage": "train", "name": "base", "from": {"data": "data-text"}, "steps": 2},
    {"stage": "train", "each": {"teacher": ["train-base"]}, "name": "draft", "from": {"data": "data-text"}},
]


def recipe(*changes):
    entries = [dict(entry) for entry in ENTRIES]
    for position, change in changes:
        entries[position].update(change)
    return Recipe(line="tiny", stages=entries)


QUIET = Run(quiet=True)


def test_each_makes_one_branch_per_value():
    names = [node.folder for node in recipe().nodes()]
    assert names == ["data-text", "train-base", "train-draft-base"]
    assert recipe().nodes()[2].inputs == {"teacher": "train-base", "data": "data-text"}


def test_repeats_of_neighbours_are_made_in_turn_each_with_its_seed(tmp_path):
    arms = [
        {"stage": "train", "name": name, "from": {"data": "data-text"}, "steps": steps, "repeats": 3}
        for name, steps in (("one", 1), ("two", 2))
    ]
    recipe = Recipe(line="l", stages=[ENTRIES[0], *arms, {**arms[0], "name": "alone", "repeats": 2, "seed": 5}])
    names = [node.folder for node in recipe.nodes()]
    assert names[:3] == ["data-text", "train-one-0", "train-two-0"]
    assert names[3:7] == ["train-one-1", "train-two-1", "train-one-2", "train-two-2"]
    assert names[7:] == ["train-alone-0", "train-alone-1"]
    assert [node.read().seed for node in recipe.nodes()[1:]] == [0, 0, 1, 1, 2, 2, 5, 6]
    again = Recipe.read(yaml.safe_load(recipe.full()))
    assert again.nodes() == [node.model_copy(update={"spec": node.read().model_dump()}) for node in recipe.nodes()]
    recipe.override({"train-two.steps": "7"}).run(tmp_path, QUIET)
    assert names == MADE
    MADE.clear()
    recipe.override({"train-two.steps": "7"}).run(tmp_path, QUIET, redo=("train-two",))
    assert MADE == ["train-two-0", "train-two-1", "train-two-2"]


@pytest.mark.parametrize("repeats", [1, 0, -2, "3", True, 2.0])
def test_repeats_are_a_whole_number_from_two_on(repeats):
    with pytest.raises(SpecError, match="repeats"):
        Recipe(line="l", stages=[ENTRIES[0], {**ENTRIES[1], "repeats": repeats}]).nodes()
    with pytest.raises(SpecError, match="has no seed"):
        Recipe(line="l", stages=[{**ENTRIES[0], "repeats": 2}]).nodes()


def test_a_second_run_makes_nothing(tmp_path):
    recipe().run(tmp_path, QUIET)
    assert MADE == ["data-text", "train-base", "train-draft-base"]
    recipe().run(tmp_path, QUIET)
    assert len(MADE) == 3
    assert Recipe.load(tmp_path / "tiny" / "recipe.yaml") == recipe()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_stage_that_becomes_whole_starts_no_other(number, tmp_path, monkeypatch):
    """As in the last step of a training; the same recipe goes on with the next stage, and after the last one nothing is left out."""
    grown, told = Grow.run, []

    def run(self, plan, draft, parents, run):
        with run.ending() as ending:
            if len(told) < len(asked):
                told.append(number)
                os.kill(os.getpid(), number)
                assert ending.asked()
            grown(self, plan, draft, parents, run)

    monkeypatch.setattr(Grow, "run", run)
    asked = [1]
    with pytest.raises(Interrupted, match="ended after train-base, stage 2 of 3, which is saved") as caught:
        recipe().run(tmp_path, QUIET)
    assert caught.value.number == number and MADE == ["data-text", "train-base"]
    asked.append(2)
    recipe().run(tmp_path, QUIET)
    assert len(told) == 2 and MADE == ["data-text", "train-base", "train-draft-base"]


def test_the_command_ends_with_the_signals_code_after_a_stage(tmp_path, monkeypatch, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe().to_yaml())

    def run(self, plan, draft, parents, run, grown=Grow.run):
        with run.ending():
            os.kill(os.getpid(), signal.SIGTERM)
            grown(self, plan, draft, parents, run)

    with monkeypatch.context() as patch:
        patch.setattr(Grow, "run", run)
        assert main(["run", str(file), f"--work={tmp_path}", "--quiet"]) == 143
    said = "ended after train-base, stage 2 of 3, which is saved; the same command resumes where it stopped"
    assert said in capsys.readouterr().err
    assert main(["run", str(file), f"--work={tmp_path}", "--quiet"]) == 0
    assert MADE == ["data-text", "train-base", "train-draft-base"]


def test_a_changed_field_is_drift_and_redo_carries_on_to_what_follows(tmp_path):
    recipe().run(tmp_path, QUIET)
    changed = recipe().override({"data.text": "bye"})
    with pytest.raises(DriftError, match=r"(?s)text.*--redo=data-text.*--work"):
        changed.run(tmp_path, QUIET)
    MADE.clear()
    changed.run(tmp_path, QUIET, redo=("data-text",))
    assert MADE == ["data-text", "train-base", "train-draft-base"]


def test_redo_drifted_makes_again_just_what_changed(tmp_path):
    recipe().run(tmp_path, QUIET)
    MADE.clear()
    recipe((2, {"steps": 7})).run(tmp_path, QUIET, redo=("drifted",))
    assert MADE == ["train-draft-base"]


def test_redo_leaves_alone_what_did_not_change(tmp_path):
    recipe().run(tmp_path, QUIET)
    MADE.clear()
    recipe().run(tmp_path, QUIET, redo=("data-text",))
    assert MADE == ["data-text"]


def test_overrides_address_stages_by_kind_or_folder():
    assert recipe().override({"train-base.steps": "9"}).nodes()[1].spec["steps"] == 9
    with pytest.raises(SpecError, match="could be any of train-base, train-draft"):
        recipe().override({"train.steps": "9"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0, {"stage": "dta"}), "did you mean 'data'"),
        ((0, {"txt": "x"}), "did you mean 'text'"),
        ((0, {"name": ""}), "has no 'name'"),
        ((1, {"name": "base", "stage": "data", "from": {}, "steps": 1}), "no field 'steps'"),
        ((1, {"from": {"data": "data-txt"}}), "did you mean 'data-text'"),
        ((2, {"each": {"teacher": "train-base"}}), "each must hold one role with a list"),
    ],
)
def test_a_mistake_in_a_recipe_is_found_before_any_work(change, words):
    with pytest.raises(SpecError, match=words):
        recipe(change).nodes()
    assert MADE == []


def test_wrong_redo_and_wrong_override_name_the_stages(tmp_path):
    with pytest.raises(SpecError, match="data-text"):
        recipe().run(tmp_path, QUIET, redo=("nothing",))
    with pytest.raises(SpecError, match="no field 'txet'"):
        recipe().override({"data.txet": "x"})
    with pytest.raises(SpecError, match="no stage 'dat'"):
        recipe().override({"dat.text": "x"})


@pytest.mark.parametrize("line", ["../x", "a/b", "", ".."])
def test_a_line_stays_in_its_folder(line):
    with pytest.raises(SpecError, match="is not a folder name"):
        Recipe(line=line, stages=[dict(entry) for entry in ENTRIES]).nodes()


def test_yaml_is_the_exact_print():
    assert Recipe.read(yaml.safe_load(recipe().to_yaml())) == recipe()


@pytest.mark.parametrize(
    "entry",
    [
        {"stage": [1], "name": "a"},
        {"stage": "data", "name": [1]},
        {"stage": "data", "name": "../../a"},
        {"stage": "train", "name": "a", "from": [1]},
        {"stage": "train", "name": "a", "from": {"data": [3]}},
        {"stage": "eval", "each": 5},
        {"stage": "eval", "each": {"model": [3]}},
    ],
)
def test_an_entry_of_wrong_types_is_a_users_mistake(entry):
    with pytest.raises(SpecError):
        Recipe(line="x", stages=[entry]).nodes()


def test_a_folder_that_another_recipe_makes_is_an_error_with_that_recipe(tmp_path):
    (tmp_path / "broken.yaml").write_text("line: [")
    (tmp_path / "first.yaml").write_text("line: one\nstages: [{stage: data, name: text, source: x}]\n")
    after = tmp_path / "second.yaml"
    after.write_text("line: two\nstages: [{stage: train, name: base, from: {data: work/one/data-text}}]\n")
    with pytest.raises(SpecError, match="'work/one/data-text', which is not made yet") as error:
        Recipe.load(after)
    assert f"make it first: `hone run {tmp_path / 'first.yaml'}`, whose stage data-text" in str(error.value)
    after.write_text(after.read_text().replace("data-text", "data-test"))
    with pytest.raises(SpecError, match="neither an earlier stage nor a folder"):
        Recipe.load(after)


def test_a_recipe_that_gives_a_field_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("line: tiny\nstages:\n- stage: train\n  name: base\n  steps: 2\n  steps: 3\n")
    with pytest.raises(SpecError, match=r"twice\.yaml gives 'steps' twice, in lines 5 and 6"):
        Recipe.load(path)


def states(rows) -> list[tuple[str, str, float | None]]:
    """Name, state and planned seconds of each row."""
    return [(row.name, row.state, row.plan.estimates["time_s"].value if row.plan else None) for row in rows]


def test_a_recipe_is_planned_before_anything_exists(tmp_path):
    planned = recipe().plan(tmp_path, QUIET)
    assert states(planned) == [
        ("data-text", "to make", 1),
        ("train-base", "to make", 10),
        ("train-draft-base", "to make", 5),
    ]
    assert all(row.problem is None for row in planned)
    assert MADE == [] and list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_planned_and_gives_its_facts(tmp_path):
    recipe().run(tmp_path, QUIET)
    assert [row.state for row in recipe().plan(tmp_path, QUIET)] == ["there"] * 3
    changed = recipe((2, {"steps": 4}))
    drifted = changed.plan(tmp_path, QUIET)[2]
    assert isinstance(drifted.problem, DriftError) and drifted.plan is None
    rows = states(changed.plan(tmp_path, QUIET, redo=("drifted",)))
    assert rows == [("data-text", "there", None), ("train-base", "there", None), ("train-draft-base", "to make", 20)]
    assert [state for _, state, _ in states(recipe().plan(tmp_path, QUIET, redo=("data-text",)))] == ["to make"] * 3


def test_what_does_not_fit_has_ways_out_and_what_follows_is_planned_all_the_same(tmp_path):
    planned = recipe((1, {"steps": 100})).plan(tmp_path, QUIET)
    problem = planned[1].problem
    assert (
        isinstance(problem, FitError) and problem.what.startswith("train-base on ") and "of disk, has" in problem.what
    )
    assert problem.fix.count("; or ") == 2
    assert [row.problem is None for row in planned] == [True, False, False], "no disk is left for what follows"
    with pytest.raises(FitError, match="of disk, has"):
        recipe((1, {"steps": 100})).run(tmp_path, QUIET)
    assert MADE == ["data-text"] and not list((tmp_path / "tiny").glob("train-*"))


def test_a_stage_that_cannot_be_planned_is_said_and_so_is_what_waits_for_it(tmp_path):
    planned = recipe((1, {"from": {"data": "data-text", "teacher": "data-text"}})).plan(tmp_path, QUIET)
    assert planned[1].problem.what == "teacher is data-text, which is a text, not a plant"
    assert planned[2].state == "waits for train-base" and planned[2].problem is None


def test_a_field_that_names_an_earlier_stage_is_its_folder_wherever_work_is(tmp_path):
    made = Recipe(line="tiny", stages=[{"stage": "data", "name": name, "text": "data-a"} for name in ("a", "b")])
    nodes = made.nodes()
    assert nodes[1].within(tmp_path / "tiny", nodes).text == str(tmp_path / "tiny" / "data-a")
    assert nodes[1].read().text == "data-a" and "text: data-a" in made.full(), "as it is written"


def test_the_plan_as_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hone.cli.line.calibrated", lambda run, *_: run)
    path = tmp_path / "r.yaml"
    path.write_text(recipe((1, {"steps": 100})).to_yaml())
    assert main(["plan", str(path), f"--work={tmp_path}"]) == 2
    said = capsys.readouterr().out
    assert "train-base" in said and "8 min 20 s" in said and "free some space" in said
    assert main(["plan", str(path), f"--work={tmp_path}", "--train-base.steps=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if "data-text" in line or "total" in line] == [
        ["data-text", "1.0", "s"],
        ["total", "16", "s"],
    ]
    assert MADE == []
    assert main(["run", str(path), f"--work={tmp_path}"]) == 2
    assert "plan: 3 stages to make" in capsys.readouterr().err and MADE == []
