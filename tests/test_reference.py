"""The reference training: its recipe plans from any folders, its page is of the run in the ledger, and what the page computes of a join."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import psutil
import pytest

from benchmarks import reference_page, reference_run
from hone.base.artifact import Artifact
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.base.spec import read_yaml
from hone.cli import main
from hone.measure.machine import describe
from hone.model.shape import Shape
from hone.recipe import Recipe
from hone.train.stage import Train
from tests.train.conftest import write_data

RECIPE = reference_run.RECIPE


def planned(folder, changes):
    """The rows of the recipe's plan, by name."""
    rows = Recipe.load(RECIPE).override(changes).plan(folder / "work", Run(quiet=True))
    return {row.name: row for row in rows}


@pytest.mark.slow
def test_it_plans_from_folders_of_text_and_says_which_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = planned(tmp_path, {})
    assert (
        "texts/books" in str(rows["data-tokenizer"].problem) and rows["data-code"].state == "waits for data-tokenizer"
    )
    for source in ("books", "code"):
        (tmp_path / "mine" / source).mkdir(parents=True)
        for number in range(30):
            said = f"def add_{number}(a, b):\n    return a + b + {number}\n" * 3
            text = (
                said
                if source == "code"
                else f"Chapter {number}. It was the best of times, it was the worst of times. " * 40
            )
            (tmp_path / "mine" / source / f"{number}.{'py' if source == 'code' else 'txt'}").write_text(text)
    places = {f"data-{one}.source": f"mine/{one}" for one in ("books", "code")}
    rows = planned(tmp_path, {**places, "data-tokenizer.source": "[mine/books, mine/code]"})
    assert {name: str(row.problem) for name, row in rows.items() if row.problem is not None} == {}
    assert rows["data-books"].state == "waits for data-tokenizer", "it takes the tokenizer that no plan has made yet"


@pytest.mark.slow
def test_its_training_is_of_about_a_hundred_million_weights(tmp_path):
    (stage,) = (one for one in read_yaml(RECIPE)["stages"] if one["stage"] == "train")
    assert 95e6 < Shape.read(stage["model"]).config(16384).num_params < 105e6
    spec = reference_run.spec_of(argparse.Namespace(small=False, set=["steps=20", "batch_size=4", "seq_len=128"]))
    assert spec["optimizer"] == stage["optimizer"] and spec["batch_size"] == 4
    facts = {f"data.{one}": facts_of(Artifact.read(write_data(tmp_path / one))) for one in ("books", "code")}
    for ranks, parallelism in reference_run.LAYOUTS.values():
        machine = describe().model_copy(update={"num_ranks": ranks})
        plan = Train.read({**spec, "parallelism": parallelism}).plan(facts, machine)
        assert plan.estimates["time_s"].value > 0 and plan.steps == 20


def test_a_training_of_several_data_alone_is_read_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for source in ("books", "code"):
        write_data(tmp_path / source)
    words = [
        "train",
        "--from.data.books=books",
        "--from.data.code=code",
        "--steps=2",
        "--seq_len=32",
        "--plan",
        "--mesh=2xH100",
    ]
    assert main(words) == 0, "".join(capsys.readouterr())
    assert main(["train", "--steps=2", "--plan"]) == 2
    assert "needs DATA" in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_killed_training_leaves_no_rank(tmp_path):
    """The launcher's child would live on without it."""
    code = "import subprocess; one = subprocess.Popen(['sleep', '900']); print(one.pid, flush=True); one.wait()"
    log = tmp_path / "log"
    begun = lambda: log.read_text().endswith("\n")  # noqa: E731
    assert reference_run.train(None, [sys.executable, "-c", code], log, 600, begun) is None
    rank = int(log.read_text())
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE


def test_the_join_is_at_half_of_the_steps_or_at_the_next_checkpoint_when_half_of_the_time_is_over():
    rows = lambda done: [{"step": step} for step in range(1, done + 1)]  # noqa: E731
    in_time = reference_run.Join(step=600, interval=200, overlap=20, half=float("inf"))
    assert not in_time.passed([]) and not in_time.passed(rows(619)) and in_time.passed(rows(620))
    late = reference_run.Join(step=600, interval=200, overlap=20, half=0.0)
    assert not late.passed(rows(210)), "the steps from the checkpoint before on would all be made twice"
    assert late.step == 400 and not late.passed(rows(419)) and late.passed(rows(420))
    slowest = reference_run.Join(step=600, interval=200, overlap=20, half=0.0)
    assert not slowest.passed([]) and slowest.step == 200
    assert reference_run.Join(600, 200, 20, half=0.0).passed(rows(620)), "never later than half of the steps"


def test_without_trials_the_layouts_are_the_first_two_that_differ():
    names = list(reference_run.LAYOUTS)
    chosen = lambda first, then: reference_run.untried_layouts(argparse.Namespace(first=first, then=then))  # noqa: E731
    assert chosen(names[:2], names[1:]) == tuple(names[:2])
    assert chosen(names[:1], names) == tuple(names[:2])


@pytest.mark.slow
def test_a_training_without_a_calibration_measures_none(tmp_path):
    write_data(tmp_path / "data")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(reference_run.ROOT)}
    words = [sys.executable, "-m", "benchmarks.uncalibrated", "train", "data", "--steps=2", "--seq_len=32"]
    for ranks in ("1", "2"):
        ended = subprocess.run(
            [*words, f"--out=out-{ranks}", f"--nproc_per_node={ranks}"], cwd=tmp_path, env=environment, timeout=800
        )
        assert ended.returncode == 0 and (tmp_path / f"out-{ranks}" / "hone.json").exists()
    assert not list(tmp_path.glob("cache/hone/calibration*"))


def test_changes_of_the_training_are_values_of_their_fields():
    changes = ["steps=20", "compile=true", "validation.sequences=3", "optimizer.lr=2e-3", "precision=fp32"]
    spec = reference_run.spec_of(argparse.Namespace(small=True, set=changes))
    assert (spec["steps"], spec["compile"], spec["precision"]) == (20, True, "fp32")
    assert spec["validation"] == {"interval": 20, "sequences": 3} and spec["optimizer"]["lr"] == 2e-3
    assert reference_run.SMALL["validation"]["sequences"] == 8


def result(jump: float = 0.0) -> dict:
    """A run whose loss falls by 0.001 a step with a wave of 0.02, and by `jump` more after step 100; no figure of any machine."""
    loss = lambda step: 5 - 0.001 * step + 0.02 * ((step * 7919) % 13 / 6 - 1) + (jump if step > 100 else 0)  # noqa: E731
    rows = [{"step": step, "loss": loss(step), "lr": 0.003, "tokens": 64 * step} for step in range(1, 201)]
    rows += [{"step": 200, "val_loss": 4.9, "val_bits_per_byte": 1.9}]
    first = [{"step": step, "loss": loss(step) - jump, "lr": 0.003, "tokens": 64 * step} for step in range(1, 111)]
    told = {
        "tokens_per_s": {"value": 640.0, "unit": "tokens/s", "formula": "f"},
        "memory_growth_bytes": {"value": 2.0**30, "unit": "B", "formula": "f"},
    }
    pace = {
        "steps": 50,
        "tokens_per_s": 700.0,
        "time_s": 0.09,
        "memory_bytes": 2**30,
        "mfu": 0.4,
        "joules_per_token": 0.1,
    }
    data = {
        "steps": [{"documents_in": 9, "documents_out": 8}],
        "splits": {"train": {"tokens": 10, "bytes": 30}, "val": {"tokens": 2, "bytes": 6}},
    }
    one = {"bits_per_byte": 1.5, "perplexity": 20.0, "bigram_perplexity": 90.0}
    return {
        "small": True, "recipe": {"batch_size": 8, "seq_len": 8}, "steps": 200, "steps_wanted": 300, "join": 100, "overlap": 10,
        "machine": {"gpus": [], "cpu": "a processor", "torch": "2"}, "made": {"commit": "0123456789"}, "calibrated": True,
        "layouts": ["zero2", "tensor parallel"], "layouts_failed": [], "predicted": {"zero2": told, "tensor parallel": told},
        "first": {"code": None, "pace": pace, "rows": first}, "second": {"code": 0, "pace": pace, "rows": rows},
        "figures": [{"name": "num_params", "value": 102e6, "unit": "parameters"}],
        "evals": [{"step": "end", "books": one, "code": one}], "data": {"books": data, "code": data},
    }  # fmt: skip


def test_a_jump_over_the_join_is_told_from_the_noise_of_the_loss():
    change, deviation, more, places = reference_page.jump(result())
    assert change == pytest.approx(-0.02, abs=0.01) and more > 20 and places > 100
    assert reference_page.overlap(result())[0] == (101, *[result()["second"]["rows"][100]["loss"]] * 2)
    change, deviation, more, places = reference_page.jump(result(jump=0.5))
    assert change == pytest.approx(0.48, abs=0.01) and change > 10 * deviation and more == 0
    assert max(abs(one - other) for _, one, other in reference_page.overlap(result(jump=0.5))) == pytest.approx(0.5)


def test_the_page_and_its_picture_are_written_from_a_result(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result()))
    kept, page, picture = (tmp_path / name for name in ("kept.json", "page.md", "picture.svg"))
    reference_page.write(path, kept, page, picture)
    text = page.read_text()
    assert (
        "200 of 200 steps" in text
        and "| zero2 | 50 | 700 | 640 | 40.0% |" in text
        and "no figure of it means anything" in text
    )
    assert "102 M weights" in text and "tensor parallel" in picture.read_text()
    assert reference_page.page(json.loads(kept.read_text())) == text, "what is kept gives the same page"
    bounds = result() | {
        "calibrated": False,
        "model_flops_per_token": 989e9,
        "ranks": [2, 2],
        "steps": 300,
        "text": "Old books.",
    }
    bounds["machine"] = {"gpus": [{"name": "H100"}] * 2, "torch": "2"}
    text = reference_page.page(bounds)
    assert "| tokens/s | bound | MFU |" in text and "relative to the data sheet's 989 TFLOP/s" in text
    assert "| zero2 | 50 | 700 | 640 | 35.0% |" in text, "700 tokens/s x 989 GFLOP over 2 GPUs of 989 TFLOP/s"
    assert (
        "200 of 300 steps" in text
        and "It ended early" in text
        and "Old books." in text
        and "trials of both" not in text
    )
    path.write_text(json.dumps({"small": True}))
    with pytest.raises(SystemExit, match="did not come so far"):
        reference_page.write(path, kept, page, picture)


def test_the_page_is_that_of_the_kept_run():
    found = reference_page.newest()
    assert reference_page.PAGE.read_text(encoding="utf8") == reference_page.page(found), (
        "run python -m benchmarks.reference_page"
    )
    assert reference_page.PICTURE.exists() == (found is not None) and not (found and found["small"])
