"""Soft prompts in `hone train`: a killed training ends with the same bytes, encoder and recomputation included, and the result is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.measure.machine import machine_of
from hone.model import hf
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.train.adapters.test_training import SPEC, TOKENS, base, train  # noqa: F401  (base is a fixture)

TEXT = {"init": "text", "init_text": "the quick brown fox"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "prefix of a text": {"kind": "prefix", **TEXT},
    "prefix of an MLP": {"kind": "prefix", "encoder_hidden_size": 16},
    "prompt tuning": {"kind": "prompt_tuning"},
    "P-tuning of an LSTM": {"kind": "p_tuning", "encoder_type": "lstm", "encoder_hidden_size": 16},
}
FULL = {"kind": "full"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "prefix of an MLP" else pytest.mark.slow) for name in TECHNIQUES],
)
def test_a_killed_training_ends_with_the_same_bytes(
    name: str,
    base: Path,  # noqa: F811
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = {"num_virtual_tokens": 6, **TECHNIQUES[name]}
    how: dict[str, Any] = {"adapter": adapter, "activation_checkpointing": FULL, "steps": 4}
    whole = train(base, data_folder, f"{name} whole", **how)
    step = Trainer.step

    def dying(self: Trainer, batch: Any) -> Any:
        if self.done == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(base, data_folder, f"{name} killed", **how)
    monkeypatch.setattr(Trainer, "step", step)
    assert train(base, data_folder, f"{name} killed", **how).content == whole.content
    tensors = load_file(whole.folder / "adapter_model.safetensors")
    assert list(tensors) == ["prompt_embeddings"] and tensors["prompt_embeddings"].shape[0] == 6
    rows = [json.loads(line) for line in (whole.folder / "steps.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    kept = train(base, data_folder, f"{name} kept", adapter=adapter, steps=4)
    other = load_file(kept.folder / "adapter_model.safetensors")["prompt_embeddings"]
    torch.testing.assert_close(other, tensors["prompt_embeddings"], rtol=0, atol=1e-4)


def test_the_text_s_loss_is_where_a_prefix_begins_and_its_folder_is_trained_on(
    base: Path,  # noqa: F811
    data_folder: Path,
) -> None:
    made = train(base, data_folder, "first", adapter={"kind": "prefix", "num_virtual_tokens": 4, **TEXT}, steps=2)
    config = json.loads((made.folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "PREFIX_TUNING" and config["num_attention_heads"] == 2 and config["token_dim"] == 24
    parents = {"data": Artifact.read(data_folder), "model": made}
    more = Train.read({**SPEC, "adapter": None, "steps": 2, "checkpoint": {"interval": 0}})
    longer = more.make(base.parent / "longer prefix", parents, Run(quiet=True))
    one, two = (load_file(each.folder / "adapter_model.safetensors")["prompt_embeddings"] for each in (made, longer))
    assert one.shape == two.shape and not torch.equal(one, two)
    with torch.no_grad():
        assert not torch.equal(hf.load(longer.folder)(TOKENS), hf.load(made.folder)(TOKENS))


def test_the_plan_counts_a_prompt(base: Path, data_folder: Path) -> None:  # noqa: F811
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(base)}
    facts = {role: facts_of(one) for role, one in parents.items()}
    machine = machine_of(Run(quiet=True))
    plan = Train.read({**SPEC, "adapter": {"kind": "prefix", "num_virtual_tokens": 6}}).plan(facts, machine)
    assert plan.estimates["trained_params"].value == 6 * 2 * 2 * 24
    layout = {"context_parallel_degree": 2}
    with pytest.raises(SpecError, match="context_parallel_degree 2 does not train adapters"):
        Train.read({**SPEC, "adapter": "prefix", "parallelism": layout}).plan(facts, machine)
