"""Recipes: branches, references, overrides, redo and what follows from it."""

import pytest
import yaml
from pydantic import Field

from hone.base import stage as stage_module
from hone.base.durable import write_jsonl
from hone.base.errors import DriftError, SpecError
from hone.base.run import Run
from hone.base.stage import Stage
from hone.recipe import Recipe

MADE: list[str] = []


class Write(Stage):
    """Writes."""

    stage = "data"
    text: str = Field("a", description="Text.")

    def execute(self, draft, parents, run):
        MADE.append(draft.target.name)
        write_jsonl(draft.folder / "x.jsonl", [{"text": self.text}])


class Grow(Stage):
    """Grows."""

    stage = "train"
    roles = {"data": True, "teacher": False}  # noqa: RUF012
    steps: int = Field(1, description="Steps.")
    seed: int = Field(0, description="Seed.")

    def execute(self, draft, parents, run):
        MADE.append(draft.target.name)
        write_jsonl(draft.folder / "y.jsonl", [{"steps": self.steps}])


@pytest.fixture(autouse=True)
def stages(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(stage_module, "STAGES", {})
    monkeypatch.setattr("hone.recipe.STAGES", {"data": "tests.test_recipe:Write", "train": "tests.test_recipe:Grow"})


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
    with pytest.raises(SpecError, match="is no folder name"):
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


def test_a_recipe_that_gives_a_field_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("line: tiny\nstages:\n- stage: train\n  name: base\n  steps: 2\n  steps: 3\n")
    with pytest.raises(SpecError, match=r"twice\.yaml gives 'steps' twice, in lines 5 and 6"):
        Recipe.load(path)
