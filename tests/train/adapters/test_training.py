"""Adapters in `hone train`: nothing else changes, the folder is PEFT's, and a killed training ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import HoneError, SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.measure.machine import machine_of
from hone.model import hf
from hone.model.decoder import build
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.forking import begin
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.ranks import made

QUIET = Run(quiet=True)
SPEC: dict[str, Any] = {
    "adapter": {"kind": "lora", "rank": 4},
    "steps": 6,
    "batch_size": 8,
    "seq_len": 32,
    "optimizer": {"kind": "adamw", "lr": 1e-2},
    "validation": {"sequences": 8},
    "checkpoint": {"interval": 2, "keep": {"optimizer": True}},
}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


@pytest.fixture(scope="module")
def base(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    meta = json.loads((data_folder / "tokens" / "meta.json").read_text())
    shape = SHAPE.model_copy(update={"num_layers": 2})
    folder = tmp_path_factory.mktemp("adapters") / "base"
    hf.save(build(shape.config(meta["vocab_size"], eos=meta["eos_token_id"]), seed=3), folder, data_folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, data_folder: Path) -> Artifact:
    return train(base, data_folder, "lora")


def train(base: Path, data: Path, out: str, **changes: Any) -> Artifact:
    parents = {"data": Artifact.read(data), "model": Artifact.read(base)}
    return Train.read({**SPEC, **changes}).make(base.parent / out, parents, QUIET)


@torch.no_grad()
def test_a_training_changes_the_adapter_alone(trained: Artifact, base: Path) -> None:
    config = json.loads((trained.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve()) and config["peft_type"] == "LORA"
    tensors = load_file(trained.folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2 and all(one.dtype == torch.float32 for one in tensors.values())
    assert all(float(one.abs().max()) > 0 for name, one in tensors.items() if ".lora_B." in name)
    model, plain = hf.load(trained.folder), hf.load(base)
    for name, weight in plain.state_dict().items():
        ours = name if name in model.state_dict() else name.replace(".weight", ".inner.weight")
        assert torch.equal(model.state_dict()[ours], weight), name
    assert not torch.equal(model(TOKENS), plain(TOKENS))
    scaled = json.loads((trained.folder / "steps.jsonl").read_text().splitlines()[0])
    assert scaled["step"] == 1 and trained.figures["trained_params"].value == sum(
        one.numel() for one in tensors.values()
    )


def test_losses_are_those_of_the_model_with_the_adapter(trained: Artifact, base: Path, data_folder: Path) -> None:
    """The first step's loss is that of the base: B begins at zero."""
    full = train(base, data_folder, "full", adapter=None, steps=2, optimizer={"kind": "adamw", "lr": 1e-3})
    rows = [
        [json.loads(line) for line in (one.folder / "steps.jsonl").read_text().splitlines()] for one in (trained, full)
    ]
    assert rows[0][0]["loss"] == pytest.approx(rows[1][0]["loss"], rel=1e-5)
    losses = [row["loss"] for row in rows[0] if "loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_killed_training_ends_with_the_same_bytes(
    precision: str, trained: Artifact, base: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained if precision == "fp32" else train(base, data_folder, "whole", precision=precision)
    step = Trainer.step

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == 5:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(base, data_folder, f"killed-{precision}", precision=precision)
    monkeypatch.setattr(Trainer, "step", step)
    assert train(base, data_folder, f"killed-{precision}", precision=precision).content == whole.content


def test_a_training_goes_on_from_an_adapter_with_its_optimizer(
    trained: Artifact, base: Path, data_folder: Path
) -> None:
    """As one that was longer from the start, where the schedule allows it."""
    schedule = {"kind": "wsd", "warmup": 2, "decay": 0.0}
    both = {"schedule": schedule, "validation": {"sequences": 1}}
    whole = train(base, data_folder, "long", **both, steps=6)
    train(base, data_folder, "short", **both, steps=3)
    keep = {"load": "schedule", "keep": {"optimizer": True}, "interval": 0}
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(base.parent / "short")}
    spec = Train.read({**SPEC, **both, "adapter": None, "checkpoint": keep})
    longer = spec.make(base.parent / "longer", parents, QUIET)
    one, other = (load_file(made.folder / "adapter_model.safetensors") for made in (whole, longer))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (longer.folder / "adapter_config.json").read_text() == (whole.folder / "adapter_config.json").read_text()


def test_the_plan_counts_what_is_trained(base: Path, data_folder: Path) -> None:
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(base)}
    facts = {role: facts_of(one) for role, one in parents.items()}
    plans = [Train.read({**SPEC, "adapter": one}).plan(facts, machine_of(QUIET)) for one in (SPEC["adapter"], None)]
    lora, full = (plan.estimates for plan in plans)
    config = plans[0].facts.config
    assert lora["trained_params"].value == config.trained_params < 0.2 * config.num_params
    assert lora["training_state_bytes"].value == 12 * config.trained_params
    assert lora["model_bytes"].value == 4 * config.trained_params
    assert lora["memory_growth_bytes"].value < full["memory_growth_bytes"].value - 8 * 0.8 * config.num_params
    frozen = config.dims().matmul_params - config.trained_dims().matmul_params
    whole = 3 * config.flops_per_token(32)
    assert config.train_flops_per_token(32) == whole - 2 * frozen
    assert "trained_params" not in full


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_ranks_train_one_adapter(kind: str, trained: Artifact, base: Path, data_folder: Path, tmp_path: Path) -> None:
    spec = {**SPEC, "parallelism": {"data_parallel": {"kind": kind}}}
    ended = together(2, _made, spec, str(data_folder), str(tmp_path / kind), str(base))
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr[-2000:] for one in ended)
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / kind, trained.folder))
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4


def _made(spec: dict[str, Any], data: str, out: str, model: str) -> str:
    return made(spec, data, out, model=model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallelism": {"data_parallel": "zero_plus_plus"}}, "data_parallel zero_plus_plus does not train adapters"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "pipeline_parallel_degree 2 does not train adapters"),
        ({"parallelism": {"tensor_parallel_degree": 2}, "adapter": {"kind": "dora"}}, "does not train adapter 'dora'"),
        (
            {"parallelism": {"tensor_parallel_degree": 2}, "adapter": {"kind": "lora", "dropout": 0.1}},
            "does not train adapter.dropout",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 2}, "adapter": {"kind": "lora", "modules_to_save": ["norm"]}},
            "does not train weights of the model",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}},
            "does not train enable_async_tensor_parallel",
        ),
        ({"precision": "fp8"}, "precision fp8 does not train adapters"),
        ({"init": "teacher"}, "init makes another one|a 'model' parent both give"),
        ({"adapter": {"kind": "lora", "target_modules": ["query"]}}, "name no linear"),
        ({"adapter": {"kind": "lora", "rank_pattern": {"down": 4}}}, "'down' in adapter.rank_pattern"),
        ({"adapter": {"kind": "lora", "target_modules": ["q_proj"], "alpha_pattern": {"k_proj": 4}}}, "'k_proj' in"),
    ],
)
def test_what_does_not_fit_is_one_error(changes: dict[str, Any], said: str, base: Path, data_folder: Path) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        parents = {"data": Artifact.read(data_folder), "model": Artifact.read(base)}
        if changes.get("init") == "teacher":
            parents["teacher"] = parents["model"]
        Train.read({**SPEC, **changes}).make(base.parent / "wrong", parents, QUIET)
    assert caught.value.fix


@pytest.mark.slow
def test_a_process_killed_in_the_middle_is_gone_on_with(base: Path, data_folder: Path, tmp_path: Path) -> None:
    """By a signal that no process can catch: the next one ends with the bytes of a training that was not killed."""
    own = {"modules_to_save": ["norm"], "trainable_token_indices": [5]}
    spec = {**SPEC, "adapter": {"kind": "lora", "rank": 2, "dropout": 0.1, **own}, "steps": 5}
    ended = [
        begin(_made_or_killed, (spec, str(data_folder), str(tmp_path / out), str(base), at))() for out, at in KILLS
    ]
    assert [one.returncode for one in ended] == [0, -signal.SIGKILL, 0]
    assert ended[2].result == ended[0].result


KILLS = (("whole", 0), ("killed", 4), ("killed", 0))
"""Trainings in turn: the folder, and the step after which the process is killed; 0: it is not."""


def _made_or_killed(spec: dict[str, Any], data: str, out: str, model: str, kill_at: int) -> str:
    step = Trainer.step

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch)

    if kill_at:
        Trainer.step = dying  # type: ignore[method-assign]
    return made(spec, data, out, model=model)


def test_rows_and_norms_train_beside_the_factors(base: Path, data_folder: Path) -> None:
    """The folder has both, and the embedding stays as it was."""
    own = {"trainable_token_indices": [5, 6], "modules_to_save": ["model.norm"]}
    made = train(base, data_folder, "own", adapter={"kind": "lora", "rank": 2, **own}, steps=2)
    tensors = load_file(made.folder / "adapter_model.safetensors")
    plain = hf.load(base)
    rows = tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert rows.shape == (2, 48) and not torch.equal(rows, plain.embedding[[5, 6]])
    assert not torch.equal(tensors["base_model.model.model.norm.weight"], plain.norm.weight)
    again = hf.load(made.folder)
    assert torch.equal(again.embed_tokens.inner.weight, plain.embedding)
    count = again.config.trained_params
    assert made.figures["trained_params"].value == count == sum(one.numel() for one in tensors.values())


def test_an_adapter_needs_its_model(trained: Artifact, base: Path, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs a model"):
        Train.read(SPEC).make(tmp_path / "none", {"data": Artifact.read(data_folder)}, QUIET)
    with pytest.raises(SpecError, match="has an adapter already"):
        train(trained.folder, data_folder, "twice")
    folder = tmp_path / "moved"
    folder.mkdir()
    values = json.loads((trained.folder / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": "owner/base"
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(HoneError, match="belongs to owner/base, which is no model folder here") as caught:
        hf.load(folder)
    assert "hf:owner/base" in str(caught.value.fix)


def test_pissa_decomposes_each_weight_once(base: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again where a killed training goes on, which ends with the same bytes."""
    step, svd, seen = Trainer.step, torch.linalg.svd, []

    def counted(*args: Any, **how: Any) -> Any:
        seen.append(args[0].shape)
        return svd(*args, **how)

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    how: dict[str, Any] = {"adapter": {"kind": "pissa", "rank": 4}, "steps": 4}
    whole = train(base, data_folder, "pissa", **how)
    assert len(seen) == 2 * 7
    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(base, data_folder, "pissa-killed", **how)
    monkeypatch.setattr(Trainer, "step", step)
    assert len(seen) == 4 * 7
    again = train(base, data_folder, "pissa-killed", **how)
    assert len(seen) == 4 * 7 and again.content == whole.content
