"""Medusa heads in `hone train`: the loss against plain torch, the folder under the paper's names, and the frozen model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.measure.machine import machine_of
from hone.model import hf
from hone.model.adapters.lora import LoRA
from hone.model.adapters.peft import adapted
from hone.model.context import Packed
from hone.model.decoder import build
from hone.model.drafters.folder import DrafterFacts
from hone.model.drafters.medusa import load
from hone.model.facts import CheckpointFacts
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.draft_heads.fits import check_heads, with_heads
from hone.train.stage import Train
from tests.serve.small import decoder
from tests.train.conftest import SHAPE

QUIET = Run(quiet=True)
SPEC: dict[str, Any] = {
    "objective": {"kind": "medusa", "num_heads": 2},
    "steps": 6,
    "batch_size": 4,
    "seq_len": 32,
    "optimizer": {"kind": "adamw", "lr": 1e-2},
    "validation": {"sequences": 4},
    "checkpoint": {"interval": 2},
}


@pytest.fixture(scope="module")
def base(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    meta = json.loads((data_folder / "tokens" / "meta.json").read_text())
    shape = SHAPE.model_copy(update={"num_layers": 2})
    folder = tmp_path_factory.mktemp("medusa") / "base"
    hf.save(build(shape.config(meta["vocab_size"], eos=meta["eos_token_id"]), seed=3), folder, data_folder)
    return folder


def train(base: Path, data: Path, out: str, **changes: Any) -> Artifact:
    parents = {"data": Artifact.read(data), "model": Artifact.read(base)}
    return Train.read({**SPEC, **changes}).make(base.parent / out, parents, QUIET)


@pytest.fixture(scope="module")
def trained(base: Path, data_folder: Path) -> Artifact:
    return train(base, data_folder, "trained")


def test_the_loss_is_that_of_tokens_further_on_in_the_same_document() -> None:
    """Against loops over positions; at the start every head is the model's own."""
    model = decoder(num_layers=1)
    objective = OBJECTIVES.read({"kind": "medusa", "num_heads": 2, "decay": 0.5})
    tokens = torch.arange(24).reshape(2, 12) * 5 % 61
    ids = torch.tensor([[0] * 7 + [1] * 5, [0] * 12])
    targets = torch.where(ids == ids.roll(-1, 1), tokens.roll(-1, 1), -100)
    targets[:, -1] = -100
    targets[1, 3] = -100  # not to be learned
    context = Packed(ids)
    with_heads(objective, model, None, 0)
    x = model.hidden(tokens, context)
    logits, expected = model.head(x).double(), 0.0
    for row in range(2):
        for at in range(12):
            for k in range(2):
                to = at + k + 1
                if to < 12 and ids[row, to] == ids[row, at] and targets[row, to] != -100:
                    expected += 0.5**k * float(F.cross_entropy(logits[row, at], targets[row, to]))
    loss = objective.total_in(model, x, targets, context, None, None)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(one.grad is not None for one in model.drafter.parameters())
    assert all(one.grad is None for name, one in model.named_parameters() if not name.startswith("drafter."))


def test_a_training_writes_heads_under_the_papers_names(trained: Artifact, base: Path) -> None:
    config = json.loads((trained.folder / "config.json").read_text())
    assert config["medusa_num_heads"] == 2 and config["medusa_num_layers"] == 1
    assert config["base_model_name_or_path"] == str(base.resolve())
    tensors = load_file(trained.folder / "medusa_lm_head.safetensors")
    vocab, width = config["vocab_size"], config["hidden_size"]
    assert {name: tuple(one.shape) for name, one in tensors.items()} == {
        f"{k}.{rest}": shape
        for k in range(2)
        for rest, shape in {
            "0.linear.weight": (width, width),
            "0.linear.bias": (width,),
            "1.weight": (vocab, width),
        }.items()
    }
    rows = [json.loads(line) for line in (trained.folder / "steps.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    assert trained.figures["val_heads_loss"].value < losses[0], "a loss of the heads, on other text"
    assert trained.figures["num_params"].value == sum(one.numel() for one in tensors.values())
    facts = facts_of(trained)
    assert isinstance(facts, DrafterFacts) and facts.num_params == trained.figures["num_params"].value
    heads = load(trained.folder, "cpu", torch.float32)
    for name, one in heads.state_dict().items():
        assert torch.equal(one, tensors[name])


def test_planned_facts_are_those_of_the_folder(trained: Artifact, base: Path, data_folder: Path) -> None:
    facts = {"data": facts_of(Artifact.read(data_folder)), "model": facts_of(Artifact.read(base))}
    planned = Train.read(SPEC).plan(facts, machine_of(QUIET)).facts
    found = facts_of(trained)
    kept = {"kind", "hidden_size", "vocab_size", "num_params", "kv_heads"}
    assert planned.model_dump(include=kept) == found.model_dump(include=kept)


def test_a_killed_training_of_heads_ends_with_the_same_bytes(
    trained: Artifact, base: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == 5:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(base, data_folder, "killed")
    monkeypatch.setattr(Trainer, "step", step)
    assert train(base, data_folder, "killed").content == trained.content


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": {"kind": "lora"}}, "without adapter"),
        ({"activation_checkpointing": {"kind": "full"}}, "without activation_checkpointing"),
        ({"early_stopping": {"val_loss": 3.0}}, "without early_stopping.val_loss"),
        ({"objective": {"kind": "medusa", "num_heads": 8}, "seq_len": 8}, "no targets for the last one"),
    ],
)
def test_what_does_not_go_with_heads_is_named(
    changes: dict[str, Any], said: str, base: Path, data_folder: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        train(base, data_folder, "wrong", **changes)


def test_heads_beside_a_folder_with_an_adapter_are_refused(base: Path) -> None:
    spec, config = Train.read(SPEC), CheckpointFacts.of(base).config
    check_heads(spec, config, {"model": None}, 1)
    with pytest.raises(SpecError, match="without an adapter in the model's folder") as caught:
        check_heads(spec, adapted(config, LoRA.read({"kind": "lora"})), {"model": None}, 1)
    assert "hone merge" in str(caught.value.fix)


def test_heads_need_a_model(data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="stays as it is"):
        Train.read(SPEC).make(tmp_path / "out", {"data": Artifact.read(data_folder)}, QUIET)
