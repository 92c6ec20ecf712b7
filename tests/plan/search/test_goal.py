"""Goals: what is read, and the one error for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base.errors import SpecError
from hone.plan.search.goal import Goal, Sizes, count_of, is_goal
from hone.plan.search.machines import fleet_of
from hone.plan.search.searching import fleets_of
from hone.plan.search.shapes import candidates_of, shape_of, sizes_of

SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}


@pytest.mark.parametrize(("text", "number"), [("8B", 8e9), ("1.5T", 1.5e12), ("300m", 3e8), ("7e9", 7e9), (5, 5.0)])
def test_counts_are_read_as_people_write_them(text, number):
    assert count_of(text) == number


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"goal": "fly"}, "goal"),
        ({"goal": "train", "machines": ["eight H100"]}, "no machine"),
        ({"goal": "train", "machines": []}, "needs a machine"),
        ({"goal": "train", "weights": {"speed": 1}}, "no axis"),
        ({"goal": "train", "weights": {"hours": 0}}, "all weights are 0"),
        ({"goal": "serve", "model": {"smallest": "1B", "largest": "2B"}}, "not a range"),
        ({"goal": "train", "model": {"smallest": "2B", "largest": "1B"}}, "larger than"),
        ({"goal": "serve", "quality": {"loss": 2.0}}, "quality.max_increase"),
        ({"goal": "train", "space": {"recomputation": ["some"]}}, "none of none"),
        ({"goal": "train", "tokens": ["many"]}, "no number"),
        ({"goal": "train", "deadlin_h": 3}, "deadline_h"),
    ],
)
def test_a_mistake_names_its_field(fields, said):
    with pytest.raises(SpecError) as error:
        Goal.read({"model": SMALL, **fields})
    assert said in f"{error.value}"


def test_a_file_with_a_key_goal_is_a_goal_and_one_with_stages_a_recipe(tmp_path):
    goal, recipe = tmp_path / "goal.yaml", tmp_path / "recipe.yaml"
    goal.write_text("goal: train\nmodel: {hidden_size: 64}\n")
    recipe.write_text("line: x\nstages: []\n")
    assert is_goal(goal) and not is_goal(recipe)
    with pytest.raises(SpecError, match="no file"):
        is_goal(tmp_path / "none.yaml")
    recipe.write_text("foo: 1\n")
    with pytest.raises(SpecError, match="neither a recipe nor a goal"):
        is_goal(recipe)


def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path):
    path = tmp_path / "goal.yaml"
    path.write_text("goal: train\nmodel: {hidden_size: 64}\ndeadline_h: -3\n")
    with pytest.raises(SpecError, match="line 3"):
        Goal.load(path)


def test_an_unknown_gpu_has_the_known_ones_as_its_fix():
    goal = Goal.read({"goal": "train", "model": SMALL, "machines": ["8xH300"]})
    with pytest.raises(SpecError, match="did you mean"):
        fleets_of(goal)


def test_a_budget_without_a_price_is_an_error_not_free_work():
    goal = Goal.read(
        {"goal": "train", "model": SMALL, "machines": ["8xH100"], "budget": 100, "price_per_hour": {"A100": 1.0}}
    )
    fleet = fleet_of("8xH100", goal)
    if fleet.price_per_hour is None:  # no catalogue knows it
        with pytest.raises(SpecError, match="price_per_hour"):
            fleets_of(goal)
        assert fleet.dollars(3.0) is None and fleet.grams(3.0) is None
    own = fleet_of("8xH100", goal.model_copy(update={"price_per_hour": 2.0}))
    assert own.dollars(3.0) == 48.0


@pytest.mark.parametrize("size", [3e8, 1e9, 2.81e9, 8e9, 70e9, 4e11])
def test_a_size_becomes_a_model_of_about_that_size(size):
    span = Sizes(smallest=size, largest=size)
    goal = Goal.read({"goal": "train", "model": {"smallest": size, "largest": size, "points": 1}})
    (candidate,) = candidates_of(goal)
    assert candidate.dims.num_params == pytest.approx(size, rel=0.12)
    shape = shape_of(size, span)
    assert shape["hidden_size"] % shape["num_heads"] == 0 and 0.5 < shape["hidden_size"] / shape["num_layers"] / 128 < 2


def test_a_range_has_equal_factors():
    found = sizes_of(Sizes(smallest=1e9, largest=8e9, points=4))
    assert found == pytest.approx([1e9, 2e9, 4e9, 8e9])


def test_equal_layers_are_counted_as_the_whole_config_counts_them():
    """The dims of many equal layers come from two of them; those of the config itself are the truth."""
    from hone.model.shape import Shape

    shape = {**SMALL, "num_layers": 7, "max_seq_len": 512}
    goal = Goal.read({"goal": "train", "model": shape, "vocab_size": 320})
    (candidate,) = candidates_of(goal)
    whole = Shape.read(candidate.shape).config(320)
    assert candidate.dims == whole.dims()
    from hone.cost.train.tensor import part_of

    assert candidate.part(2) == part_of(whole.local(2).dims(), 2)


def test_a_folder_with_a_config_alone_is_trained_anew(tiny_llama, tmp_path):
    import shutil

    shutil.copy(Path(tiny_llama) / "config.json", tmp_path / "config.json")
    (candidate,) = candidates_of(Goal.read({"goal": "train", "model": str(tmp_path)}))
    assert candidate.shape is not None and candidate.shape["hidden_size"] == 64 and candidate.shape["num_layers"] == 2
    (whole,) = candidates_of(Goal.read({"goal": "train", "model": str(tiny_llama)}))
    assert whole.shape is None  # it has weights: a training goes on from them
