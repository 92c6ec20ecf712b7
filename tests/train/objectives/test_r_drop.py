"""R-Drop: the loss and its gradients against the formula in float64, its passes in a training, its errors, and that a killed training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.base.run import Run
from hone.feed.load import Batch
from hone.measure.machine import machine_of
from hone.model import hf
from hone.model.adapters import ADAPTERS
from hone.model.adapters.trainable import Trainable
from hone.model.context import Causal
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.objectives.test_objectives import batch, model

QUIET = Run(quiet=True)
SPEC: dict[str, Any] = {
    "adapter": {"kind": "lora", "rank": 4, "dropout": 0.3},
    "objective": {"kind": "r_drop", "alpha": 2.0},
    "optimizer": {"lr": 1e-2},
    "batch_size": 4,
    "seq_len": 32,
    "steps": 14,
    "checkpoint": {"interval": 3},
    "validation": {"sequences": 4},
}


def by_hand(first: torch.Tensor, second: torch.Tensor, targets: torch.Tensor, alpha: float) -> torch.Tensor:
    """-log p(y) - log q(y) + alpha / 2 (KL(p || q) + KL(q || p)) summed over targets, of logits [T, V]: the paper's formula."""
    kept = targets != -100
    first, second, targets = first[kept], second[kept], targets[kept]
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    text = F.cross_entropy(first, targets, reduction="sum") + F.cross_entropy(second, targets, reduction="sum")
    apart = [F.kl_div(log_q, log_p, log_target=True, reduction="sum")]
    apart += [F.kl_div(log_p, log_q, log_target=True, reduction="sum")]
    return text + alpha / 2 * (apart[0] + apart[1])


@pytest.mark.parametrize("chunk", [7, 1024])
def test_the_loss_is_the_papers_and_its_gradient_is_of_both_passes(chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("hone.train.objectives.r_drop.default_chunk_tokens", lambda *_: chunk)
    one, (_, targets) = model(0), batch()
    x = torch.randn(6, 20, one.config.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    objective = OBJECTIVES.read({"kind": "r_drop", "alpha": 3.0})
    loss = objective.total(one, x, targets.repeat_interleave(2, 0), None, None)
    found = torch.autograd.grad(loss, [x, one.head_weight])
    logits = (one.head_input(x).double() @ one.head_weight.double().T).unflatten(0, (3, 2))
    wanted = by_hand(logits[:, 0].flatten(0, 1), logits[:, 1].flatten(0, 1), targets.flatten(), 3.0)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, [x, one.head_weight]), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def base(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    meta = json.loads((data_folder / "tokens" / "meta.json").read_text())
    folder = tmp_path_factory.mktemp("r_drop") / "base"
    config = SHAPE.model_copy(update={"num_layers": 1}).config(meta["vocab_size"], eos=meta["eos_token_id"])
    hf.save(build(config, seed=3), folder, data_folder)
    return folder


def test_a_step_compares_two_passes_that_dropout_makes_differ(base: Path) -> None:
    """Of one micro-batch and the same random numbers; tokens are counted once, and micro-batches keep both passes of a sequence."""
    adapter = ADAPTERS.read({"kind": "lora", "rank": 4, "dropout": 0.5})
    tokens, targets = batch()
    given = Batch(tokens.numpy(), targets.numpy(), np.zeros(tokens.shape, np.int32))
    losses = []
    for parts in (1, 3):
        one = Trainable(hf.Checkpoint(base), adapter).build("cpu", torch.float32)
        with torch.no_grad():
            for index, parameter in enumerate(one.parameters()):
                if parameter.requires_grad:
                    parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(index))
        objective = OBJECTIVES.read(SPEC["objective"])
        how = {"schedule": Cosine(warmup=0), "objective": objective, "gradient_accumulation_steps": parts}
        trainer = Trainer(one, steps=4, **how)
        torch.manual_seed(5)
        sums, counts = trainer.gradients(trainer.prepared(given))
        torch.manual_seed(5)
        total = 0.0
        for part in np.array_split(np.arange(3), parts):
            twice = tokens[part].repeat_interleave(2, 0)
            logits = one(twice, Causal(twice)).double().detach().unflatten(0, (-1, 2))
            assert not torch.equal(logits[:, 0], logits[:, 1])
            each = (logits[:, at].flatten(0, 1) for at in range(2))
            total += float(by_hand(*each, targets[part].flatten(), 2.0))
        assert counts.targets == 2 * (3 * 19 - 4) and counts.tokens == tokens.numel()
        assert float(sums.loss) == pytest.approx(total, rel=1e-4)
        losses.append(total)
    assert losses[0] != losses[1]  # other random numbers


def test_a_plan_has_twice_the_passes_and_the_tokens_once(base: Path, data_folder: Path) -> None:
    facts = {"data": facts_of(Artifact.read(data_folder)), "model": facts_of(Artifact.read(base))}
    spec = {**SPEC, "seq_len": 64, "batch_size": 16}
    twice, once = (
        Train.read({**spec, "objective": one}).plan(facts, machine_of(QUIET)).estimates
        for one in (SPEC["objective"], "next_token")
    )
    assert twice["train_tokens"].value == once["train_tokens"].value
    assert twice["tokens_per_s"].value < once["tokens_per_s"].value
    assert twice[MEMORY].value > once[MEMORY].value


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(None, "only adapters have it"), ({"kind": "lora"}, "the adapter has none"), ({"kind": "ia3"}, "has none")],
)
def test_without_dropout_it_is_refused(adapter: Any, said: str, base: Path, data_folder: Path) -> None:
    facts = {"data": facts_of(Artifact.read(data_folder)), "model": facts_of(Artifact.read(base))}
    with pytest.raises(SpecError, match=said) as caught:
        Train.read({**SPEC, "adapter": adapter}).plan(facts, machine_of(QUIET))
    assert "adapter.dropout=0.1" in caught.value.fix


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(base: Path, data_folder: Path, tmp_path: Path) -> None:
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(base)}
    expected = Train.read(SPEC).make(tmp_path / "train-whole", parents, QUIET)
    plain = Train.read({**SPEC, "objective": {"kind": "r_drop", "alpha": 0.0}})
    assert plain.make(tmp_path / "train-plain", parents, QUIET).content != expected.content
    found = content_after_kills(SPEC, data_folder, tmp_path / "train-killed", (5,), parents={"model": base})
    assert found == expected.content
