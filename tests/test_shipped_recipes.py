"""The recipes that are shipped can be planned before anything exists, as docs/plans.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.model import hf
from hone.model.decoder import build
from hone.recipe import Planned, Recipe
from hone.report.write import build as build_report
from hone.train.continuation.start import Start
from hone.train.stage import TrainPlan
from tests.train.conftest import SHAPE, write_data

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize(
    "name", ["case_study", "curation", "dpo", "grpo", "qlora", "sft", "tiny", "verification"]
)  # the others begin with what tiny made
def test_a_shipped_recipe_is_planned_before_anything_exists(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(RECIPES)
    planned = {row.name: row for row in Recipe.load(RECIPES / f"{name}.yaml").plan("elsewhere", Run(quiet=True))}
    assert {row.name: row.problem.what for row in planned.values() if row.problem is not None} == {}
    if name == "curation":  # one arm takes the tokenizer of the other, which no plan has made yet
        assert planned["data-raw"].state == "waits for data-curated"
        assert planned["train-raw-0"].state == "waits for data-raw" and planned["train-curated-0"].plan is not None
    if name == "verification":
        begin_alike(planned, 3)  # the controls: their candidates are not planned before there is a tokenizer


@pytest.mark.parametrize("name", ["distill", "qat", "prune_distill_quantize"])
def test_a_recipe_on_what_tiny_made_is_planned_from_that_alone(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "work/tiny/data-text")
    shape = SHAPE.model_copy(update={"hidden_size": 64, "max_seq_len": 256})
    hf.save(build(shape.config(PackedTokens(data).vocab_size)), tmp_path / "work/tiny/train-base", tokenizer_from=data)
    rows = Recipe.load(RECIPES / f"{name}.yaml").plan("work", Run(quiet=True))
    assert {row.name: row.problem.what for row in rows if row.problem is not None} == {}
    assert all(row.plan is not None for row in rows)


def test_every_round_of_a_lottery_ticket_and_its_control_read_the_same_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "work/tiny/data-text")
    rows = Recipe.load(RECIPES / "lottery_ticket.yaml").plan("work", Run(quiet=True))
    begin_alike({row.name: row for row in rows}, 9)


@pytest.mark.slow
def test_draft_heads_are_trained_and_serve_as_the_recipe_says(tmp_path, monkeypatch):
    """recipes/eagle3.yaml, made small: heads of both kinds beside a model, and serving without and with them."""
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "work/tiny/data-text")
    meta = json.loads((data / "tokens" / "meta.json").read_text())
    shape = SHAPE.model_copy(update={"num_layers": 2})
    config = shape.config(meta["vocab_size"], eos=meta["eos_token_id"])
    hf.save(build(config, seed=3), tmp_path / "work/tiny/train-base", data)
    short = {f"train-{name}.{field}": value for name in ("medusa", "eagle") for field, value in SHORT.items()}
    few = {f"serve-{name}.{field}": value for name in ("plain", "medusa", "eagle") for field, value in FEW.items()}
    Recipe.load(RECIPES / "eagle3.yaml").override(short | few).run("work", Run(quiet=True))
    made = {
        name: Artifact.read(tmp_path / "work/eagle3" / f"serve-{name}").figures for name in ("plain", "medusa", "eagle")
    }
    assert made["plain"]["tokens_per_verification"].value is None
    for name in ("medusa", "eagle"):
        assert 1 <= made[name]["tokens_per_verification"].value <= 4 and made[name]["tokens_per_verification"].n > 0
        assert made[name]["kv_cache_bytes"].value >= made["plain"]["kv_cache_bytes"].value


@pytest.mark.slow
def test_an_adapter_beside_codes_is_trained_as_the_recipe_says(tmp_path, monkeypatch):
    """recipes/qlora.yaml, made small: less text and fewer steps, to its end."""
    pytest.importorskip("numba")
    monkeypatch.chdir(tmp_path)
    small = {"data-text.max_bytes": "300000", "data-more.max_bytes": "200000", "train-base.steps": "12"}
    small |= {"train-base.validation.interval": "6", "train-base.early_stopping": "{}"}
    small |= {"train-tuned.steps": "12", "train-tuned.validation.interval": "6", "train-tuned.early_stopping": "{}"}
    Recipe.load(RECIPES / "qlora.yaml").override(small).run("work", Run(quiet=True))
    made = tmp_path / "work/qlora"
    rows = [row for row in read_jsonl(made / "train-tuned/steps.jsonl") if "val_loss" in row]
    assert [row["step"] for row in rows] == [6, 12] and rows[1]["val_loss"] < rows[0]["val_loss"]
    figures = {name: Artifact.read(made / name).figures for name in ("train-base", "train-tuned")}
    trained = figures["train-tuned"]["trained_params"].value
    assert 0 < trained < figures["train-base"]["num_params"].value / 5
    begun, ended = (hf.load(made / name) for name in ("compress-nf4", "train-tuned"))
    stored = dict(begun.layers[0].mixer.qkv.named_buffers())
    assert stored and "adapter_config.json" in {path.name for path in (made / "train-tuned").iterdir()}
    beside = dict(ended.layers[0].mixer.qkv.inner.named_buffers())  # the codes stayed as they were
    assert all((beside[name] == one).all() for name, one in stored.items())


SHORT = {"steps": "3", "batch_size": "2", "seq_len": "16", "validation.sequences": "1"}
FEW = {"num_requests": "2", "prompt_tokens": "[4, 8]", "output_tokens": "[8, 8]"}


@pytest.mark.slow
def test_the_case_study_runs_to_its_end(tmp_path, monkeypatch):
    """recipes/case_study.yaml, made small: text, training, three compressions, healing, evaluations, three servers and the report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for path in sorted(Path(json.__file__).parent.parent.glob("[ab]*.py")):  # some of the standard library
        (tmp_path / "text" / path.name).write_bytes(path.read_bytes())
    few = {"num_requests": "4", "output_tokens": "[4, 8]", "prompt_tokens": "[4, 8]", "shared_prefix": "16"}
    given = {
        "data-text.source": str(tmp_path / "text"), "data-text.tokenizer.vocab_size": "320", "train-base.steps": "12",
        "train-base.seq_len": "64", "train-base.validation.interval": "12", "train-healed.steps": "4", "train-healed.seq_len": "64",
        "compress-pruned.seq_len": "64", "compress-int4.seq_len": "64", "compress-int4.num_sequences": "8", "eval.max_tokens": "1024",
    }  # fmt: skip
    given |= {f"serve-{name}.{field}": one for name in ("plain", "int4", "unoptimized") for field, one in few.items()}
    Recipe.load(RECIPES / "case_study.yaml").override(given).run("work", Run(quiet=True))
    made = {
        path.name: Artifact.read(path)
        for path in (tmp_path / "work/case_study").iterdir()
        if (path / "hone.json").exists()
    }
    assert {"data-text", "train-base", "compress-pruned", "train-healed", "compress-int4"} <= made.keys()
    assert sum(name.startswith("eval-") for name in made) == 4 and sum(name.startswith("serve-") for name in made) == 9
    assert made["compress-int4"].figures["model_bytes"].value < made["train-base"].figures["model_bytes"].value / 2
    assert "case_study" in build_report(tmp_path / "work/case_study").read_text()


def begin_alike(planned: dict[str, Planned], count: int) -> None:
    """All `count` trainings that go on from a model, of every seed, read their data from the start."""
    plans = [row.plan for row in planned.values() if isinstance(row.plan, TrainPlan)]
    assert len(plans) == count + 1, "those and the one that made the model"
    assert all(plan.start == Start() for plan in plans)
