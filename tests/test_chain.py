"""The whole chain on a small scale: every stage of the tiny recipe, its predictions, its report, its page of commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.recipe import Recipe
from tests.conftest import mini_recipe


@pytest.fixture(scope="module")
def artifacts(mini_line):
    return {path.parent.name: Artifact.read(path.parent) for path in (mini_line / "work" / "tiny").glob("*/hone.json")}


def test_every_stage_of_the_recipe_is_there(artifacts, mini_source):
    assert set(artifacts) == {node.folder for node in mini_recipe(mini_source).nodes()}
    for artifact in artifacts.values():
        artifact.verify()


def test_every_stage_says_before_what_it_measures_after(artifacts):
    for name, artifact in artifacts.items():
        figures = artifact.figures
        for figure in ("time_s", "peak_memory_bytes"):
            assert figures[figure].estimate is not None, f"{name} predicted no {figure}"
            assert figures[figure].value > 0
        assert figures["energy_j"].value != 0, "an absent sensor is None, never 0"


def test_what_was_done_is_carried_along(artifacts):
    done = [(row["slot"], row["kind"]) for row in artifacts["compress-gptq4"].techniques]
    assert ("quantizer", "gptq") in done
    assert artifacts["compress-gptq4"].manifest["parents"][0]["name"] == "train-base"


def test_compression_is_worth_it_and_costs_little(artifacts):
    whole = artifacts["train-base"].figures["model_bytes"].value
    assert artifacts["compress-int8"].figures["model_bytes"].value < 0.5 * whole
    assert artifacts["compress-gptq4"].figures["model_bytes"].value < 0.4 * whole
    # int8 must be all but free; int4 of a barely trained model still close
    base = artifacts["eval-base"].figures["perplexity"].value
    assert artifacts["eval-int8"].figures["perplexity"].value == pytest.approx(base, rel=0.01)
    assert (
        artifacts["eval-gptq4"].figures["kl_to_reference"].value
        <= artifacts["eval-rtn4"].figures["kl_to_reference"].value
    )
    assert artifacts["eval-base"].figures["kl_to_reference"].value == 0


def test_speculation_does_not_change_greedy_text(artifacts):
    import hone

    prompts = ["import json", "def loads(", "class Message:"]
    texts = []
    for draft in (None, str(artifacts["train-draft"].folder)):
        engine = hone.Engine(artifacts["train-base"].folder, hone.EngineSpec(draft=draft))
        params = hone.SamplingParams(max_tokens=24, temperature=0)
        texts.append([done.tokens for done in engine.generate(prompts, params)])
        drafted = engine.stats()["draft_tokens"]
    assert texts[0] == texts[1] and drafted > 0


def test_serving_changes_no_sampled_text(artifacts):
    """Batching, the prefix cache and a draft model change how fast a text comes, not which."""
    arms = ("plain-0", "plain-1", "speculative-0", "static-batching-0", "no-prefix-cache-0")
    texts = {(artifacts[f"serve-{arm}"].folder / "samples.jsonl").read_text() for arm in arms}
    assert len(texts) == 1 and all(json.loads(line)["text"] for line in texts.pop().splitlines())


def test_a_second_run_makes_nothing(mini_line, mini_source, tmp_path):
    made = []
    home = shutil.copytree(mini_line, tmp_path / "home")
    mini_recipe(mini_source).run(home / "work", Run(quiet=True), watch=lambda *row: made.append(row[-1]))
    assert made and not any(made)


def test_the_report_shows_every_artifact(mini_line, artifacts):
    folder = mini_line / "work" / "tiny" / "report"
    page, rows = (folder / "index.html").read_text(), json.loads((folder / "report.json").read_text())
    assert (folder / "report.md").exists() and rows
    for name in artifacts:
        assert name in page


def test_a_model_made_here_loads_in_transformers_and_in_hone_alike(artifacts):
    import torch
    import transformers

    import hone

    folder = artifacts["compress-gptq4"].folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([hone.load_tokenizer(folder).encode("import json\n\ndef loads(")])
    with torch.no_grad():
        assert (hone.load(folder)(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_can_be_read(path, tmp_path, monkeypatch):
    """Beside what recipes/tiny.yaml makes, on which some of them build."""
    for name in ("data-text", "train-base"):
        (tmp_path / "work" / "tiny" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(path)
    assert recipe.line == path.stem and len(recipe.nodes()) > 1
