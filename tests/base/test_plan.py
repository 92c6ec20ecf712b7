"""Plans: facts of folders and of what is still to be made, shortages with ways out, the order of techniques."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import ClassVar

import pytest

from hone.base.artifact import Artifact, Draft
from hone.base.errors import ArtifactError, FitError, SpecError
from hone.base.figure import Estimate
from hone.base.plan import DISK, MEMORY, Facts, Plan, capacity, check_order, facts_of, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.feed.facts import DataFacts
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts

QUIET = Run(quiet=True)


class Dig(Stage):
    stage = "dig"
    roles: ClassVar = {"model": False}

    depth: int = 1

    def plan(self, facts, machine) -> Plan:
        memory = Estimate(value=self.depth * 1e12, unit="B", formula=f"{self.depth} TB a spade")
        return Plan(estimates={MEMORY: memory}, ways={MEMORY: ("dig less", "borrow", "hire")})

    def run(self, plan: Plan, draft: Draft, parents, run) -> None:
        (draft.folder / "hole").write_text(plan.estimates[MEMORY].formula)
        draft.record(MEMORY, 1.0, "B")


def test_a_stage_that_does_not_fit_writes_nothing(tmp_path):
    with pytest.raises(FitError, match=r"dig-a needs 90\.9 TiB of memory, has ") as refused:
        Dig(depth=100).make(tmp_path / "dig-a", run=QUIET)
    assert refused.value.fix == "dig less; or borrow; or hire"
    assert list(tmp_path.iterdir()) == []


def test_estimates_stand_beside_the_figures(tmp_path):
    made = Dig(depth=0).make(tmp_path / "dig-a", run=QUIET)
    assert (made.folder / "hole").read_text() == "0 TB a spade"
    assert made.figures[MEMORY].estimate.value == 0
    assert made.figures["disk_bytes"].value == len("0 TB a spade")
    assert Dig(depth=0).make(tmp_path / "dig-a", run=QUIET).fingerprint == made.fingerprint


def test_facts_of_a_model_folder(tiny_llama):
    facts = facts_of(Artifact.read(tiny_llama))
    assert isinstance(facts, CheckpointFacts)
    assert (facts.config.hidden_size, facts.dtype, facts.quantization) == (64, "float32", None)
    assert facts.weights_bytes == (tiny_llama / "model.safetensors").stat().st_size
    assert facts.given == {"weights:float"} and facts.loaded_bytes("bfloat16") == 2 * facts.config.num_params
    assert need({"model": facts}, "model", CheckpointFacts) is facts
    with pytest.raises(ArtifactError, match=r"data is .* which is a model, not a data set"):
        need({"data": facts}, "data", DataFacts)


def test_a_dtype_that_config_does_not_state_is_that_of_most_bytes(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "unstated")
    config = {
        name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "dtype" not in name
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert CheckpointFacts.of(folder).dtype == "float32"
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ArtifactError, match="its header cannot be read"):
        CheckpointFacts.of(folder)


def test_facts_of_data_are_read_from_its_description(tmp_path):
    row = {"tokens": 1001, "documents": 3, "bytes": 4000}
    meta = {"dtype": "uint16", "vocab_size": 320, "eos_token_id": 0, "splits": {"train": row}}
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    (tmp_path / "data" / "tokens" / "meta.json").write_text(json.dumps(meta))
    facts = facts_of(Artifact.read(tmp_path / "data"))
    assert isinstance(facts, DataFacts) and facts.exact and facts.tokenizer is None
    assert facts.split("train").num_sequences(100) == 10 and facts.split("train").num_sequences(300) == 4
    assert facts.given == {"calibration"}
    with pytest.raises(SpecError, match="has no split 'val'"):
        facts.split("val")
    (tmp_path / "data" / "tokens" / "meta.json").write_text(json.dumps({**meta, "splits": {"train": {"tokens": 3}}}))
    with pytest.raises(ArtifactError, match=r"meta\.json is corrupt: KeyError"):
        facts_of(Artifact.read(tmp_path / "data"))


def test_a_folder_that_holds_neither_is_said_to(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(
        ArtifactError,
        match=r"has no config.json \(model\) and no logits/meta.json \(cache of logits\) and no tokens/meta.json \(data set\)",
    ):
        facts_of(Artifact.read(tmp_path / "x"))


def test_capacity_counts_what_an_interrupted_stage_wrote_already(tmp_path, monkeypatch):
    def used(folder):
        """A disk of 1 GB that only this test writes to: the real one has other writers."""
        assert tmp_path.is_relative_to(folder) or folder.is_relative_to(tmp_path)
        files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        return SimpleNamespace(free=10**9 - sum(files))

    monkeypatch.setattr(shutil, "disk_usage", used)
    machine = describe()
    before = capacity(machine, tmp_path / "line" / "data-a")
    assert 0 < before[MEMORY] < machine.ram_bytes and before[DISK] == 10**9
    (tmp_path / "line" / "data-a.partial").mkdir(parents=True)
    (tmp_path / "line" / "data-a.partial" / "half").write_bytes(bytes(64 << 20))
    assert capacity(machine, tmp_path / "line" / "data-a")[DISK] == before[DISK]


def step(kind: str, needs=(), gives=(), takes=()) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, needs=frozenset(needs), gives=frozenset(gives), takes=frozenset(takes))


def test_the_order_of_techniques_follows_from_needs_and_gives():
    prune = step("prune", {"weights:float"})
    fit = step("fit", {"weights:float", "calibration"}, {"weights:int"}, {"weights:float"})
    given = frozenset({"weights:float", "calibration"})
    assert check_order([prune, fit], given, {}) == {"weights:int", "calibration"}
    with pytest.raises(SpecError, match="prune needs weights:float, which fit removes") as wrong:
        check_order([fit, prune], given, {})
    assert wrong.value.fix == "put prune before fit"
    with pytest.raises(SpecError, match="fit needs calibration") as missing:
        check_order([fit], frozenset({"weights:float"}), {"calibration": "add data: NAME"})
    assert missing.value.fix == "add data: NAME"


def test_facts_are_frozen_and_named():
    facts = Facts(where="stage data-text")
    with pytest.raises(ValueError, match="frozen"):
        facts.where = "elsewhere"
    assert facts.given == frozenset()
