"""The shipped recipes of conversions, made small, on what the recipe tiny made."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.recipe import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = {
    "gqa_uptrain": {"compress-gqa.steps": "[{kind: gqa, num_kv_heads: 1}]"},
    "transmla": {
        "compress-exact.steps": "[{kind: transmla, rope_heads: 2, latent_norm: false}]",
        "compress-latent.steps": "[{kind: transmla, kv_rank: 24}]",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_converts_and_heals(name: str, mini_line, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/tiny").symlink_to(mini_line / "work/tiny")
    recipe = Recipe.load(RECIPES / f"{name}.yaml")
    sizes = {"train": {"steps": "2", "batch_size": "2", "seq_len": "64", "early_stopping": "{}", "validation": "{}"},
             "compress": {"num_sequences": "4", "seq_len": "64"}, "eval": {"max_tokens": "512", "window": "64"}}  # fmt: skip
    given = {f"{one['stage']}{'-' + one['name'] if 'name' in one else ''}": one["stage"] for one in recipe.stages}
    small = {f"{stage}.{field}": value for stage, kind in given.items() for field, value in sizes[kind].items()}
    made = recipe.override(small | SMALL[name]).run(Path("work"), Run(quiet=True))
    healed = Artifact.read(made / "train-healed").figures
    converted = [Artifact.read(one) for one in made.iterdir() if one.name.startswith("compress")]
    assert healed["val_loss"].value > 0 and all(one.figures["kl_to_dense"].value is not None for one in converted)
    losses = [Artifact.read(one).figures["kl_to_reference"] for one in made.iterdir() if one.name.startswith("eval")]
    assert len(losses) == len(recipe.stages[-1]["each"]["model"]) and all(one.value is not None for one in losses)
