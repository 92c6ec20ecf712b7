"""The recipes that are shipped can be planned before anything exists, as docs/plans.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base.run import Run
from hone.recipe import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("name", ["curation", "tiny", "verification"])  # the others begin with what tiny made
def test_a_shipped_recipe_is_planned_before_anything_exists(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = {row.name: row for row in Recipe.load(RECIPES / f"{name}.yaml").plan("elsewhere", Run(quiet=True))}
    assert {row.name: row.problem.what for row in planned.values() if row.problem is not None} == {}
    if name == "curation":  # one arm takes the tokenizer of the other, which no plan has made yet
        assert planned["data-raw"].state == "waits for data-curated"
        assert planned["train-raw-0"].state == "waits for data-raw" and planned["train-curated-0"].plan is not None
