"""Curves go where the user names them, and nowhere else: the points, one run over interruptions, and what is refused."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import HoneError, MissingExtra
from hone.base.run import Run
from hone.cli import main
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.train.conftest import SHAPE

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 2,
    "seq_len": 32,
    "steps": 6,
    "validation": {"interval": 3, "sequences": 4},
    "checkpoint": {"interval": 2},
}
SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "max_seq_len")


class Recorded:
    """A run of the stand-in: it remembers, as wandb's server does, the last step that any process of the run sent."""

    def __init__(self, module: types.ModuleType, given: dict) -> None:
        self.given, self.id, self.offline, self.url = given, given["id"], given["mode"] == "offline", "https://wandb"
        self.points: list[tuple[int, dict]] = []
        self.exit_code: int | None = None
        self.step = module.sent.get(self.id, -1) + 1
        self._sent = module.sent

    def log(self, scalars: dict, step: int) -> None:
        assert self.exit_code is None, "logged after the end"
        self.points.append((step, scalars))
        self._sent[self.id] = step

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch) -> types.ModuleType:
    """A stand-in for the package that records every run."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.runs, module.sent = [], {}
    module.Settings = dict
    module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))

    def init(**given) -> Recorded:
        module.runs.append(Recorded(module, given))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def make(data_folder, out, wandb: dict | None = None) -> Artifact:
    return Train.read(SPEC).make(out, {"data": Artifact.read(data_folder)}, Run(quiet=True, wandb=wandb))


def points_of(folder) -> list[tuple[int, dict]]:
    """The points that the lines of steps.jsonl are, without speeds."""
    points = []
    for row in read_jsonl(folder / "steps.jsonl"):
        if "loss" in row:
            points.append((row["step"], {f"train/{name}": row[name] for name in ("loss", "lr", "grad_norm")}))
        else:
            losses = {"val/loss": row["val_loss"], "val/bits_per_byte": row["val_bits_per_byte"]}
            points.append((row["step"], losses))
    return points


def without_speeds(points: list[tuple[int, dict]]) -> list[tuple[int, dict]]:
    return [(step, {name: value for name, value in row.items() if "speed" not in name}) for step, row in points]


def test_wandb_gets_every_point_and_changes_nothing(wandb, data_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    plain = make(data_folder, tmp_path / "train-plain")
    assert not wandb.runs, "nothing is sent unless the user names it"
    made = make(data_folder, tmp_path / "train-base", wandb={"project": "p", "entity": "e", "mode": "offline"})
    (run,) = wandb.runs
    assert without_speeds(run.points) == points_of(made.folder) and run.exit_code == 0
    assert all(row["speed/tokens_per_s"] > 0 for _, row in run.points if "train/loss" in row)
    assert {name: run.given[name] for name in ("project", "entity", "mode", "name", "resume")} == {
        "project": "p",
        "entity": "e",
        "mode": "offline",
        "name": "train-base",
        "resume": "allow",
    }
    assert run.given["config"]["steps"] == 6 and json.dumps(run.given["config"])
    assert made.fingerprint == plain.fingerprint and made.content == plain.content


def test_a_resumed_training_goes_on_in_its_run(wandb, data_folder, tmp_path, monkeypatch):
    """It was killed after step 5, and goes on from the checkpoint of step 4: step 5 is not sent twice."""
    step = Trainer.step

    def killed(trainer, batch):
        if trainer.done == 5:
            raise KeyboardInterrupt
        return step(trainer, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", killed)
        make(data_folder, tmp_path / "train-base", wandb={"project": "p"})
    made = make(data_folder, tmp_path / "train-base", wandb={"project": "p"})
    first, second = wandb.runs
    assert first.id == second.id and (first.exit_code, second.exit_code) == (1, 0)
    assert without_speeds(first.points + second.points) == points_of(made.folder)
    again = make(data_folder, tmp_path / "train-again", wandb={"project": "p"})
    assert wandb.runs[-1].id != first.id and again.content == made.content


def test_a_missing_package_is_an_error_that_names_the_extra(data_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("hone.train.curves.wandb.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"'wandb', which is not installed\nfix: pip install 'hone-llm\[wandb\]'"):
        make(data_folder, tmp_path / "train-base", wandb={"project": "p"})
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_wandb_errors_say_the_way_out(wandb, data_folder, tmp_path):
    def init(**given):
        raise wandb.errors.Error("api_key not configured")

    wandb.init = init
    with pytest.raises(HoneError, match=r"api_key not configured\nfix: run `wandb login`, or .*--wandb.mode=offline"):
        make(data_folder, tmp_path / "train-base", wandb={"project": "p"})


def test_the_command_line_names_the_run(wandb, data_folder, tmp_path, capsys):
    shape = [f"--model.{name}={value}" for name, value in SHAPE.model_dump(exclude_none=True).items() if name in SIZES]
    words = ["train", f"--from.data={data_folder}", f"--out={tmp_path / 'train-base'}", "--steps=1", "--seq_len=32"]
    assert main([*words, *shape, "--batch_size=2", "--wandb.project=p", "--wandb.name=first try"]) == 0
    assert wandb.runs[0].given["name"] == "first try" and wandb.runs[0].given["mode"] is None
    assert f"wandb: run {wandb.runs[0].id} of project p, https://wandb" in capsys.readouterr().err
    assert main([*words, *shape, "--wandb.mode=offline", "--plan"]) == 2
    assert "--wandb.mode without a project" in capsys.readouterr().err
    assert main([*words, *shape, "--wandb.project=p", "--wandb.mod=offline", "--plan"]) == 2
    assert "did you mean 'mode'?" in capsys.readouterr().err


@pytest.mark.slow
def test_wandb_itself_keeps_an_offline_run(data_folder, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = make(data_folder, tmp_path / "train-base", wandb={"project": "p"})
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stem.removeprefix("run-") == kept.parent.name.split("-")[-1]
    made.verify()
