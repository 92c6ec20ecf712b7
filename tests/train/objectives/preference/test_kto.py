"""KTO against its formula over whole logits, over any division of a batch, and in small trainings on held-out answers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hone.base.errors import HoneError
from hone.base.run import Run
from hone.feed.load import IGNORE, Batch, PackedTokens
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.preference.kto import mismatched
from hone.train.objectives.preference.measure import held_out
from hone.train.optimizers.adamw import AdamW
from hone.train.passes import to_device
from hone.train.schedules.cosine import Cosine
from tests.train.conftest import SHAPE
from tests.train.objectives.preference.pairs import write_answers, write_pairs

QUIET = Run(quiet=True)
OPTIONS = {"kind": "kto", "beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_answers(tmp_path_factory.mktemp("answers"))


def trainer_of(data: PackedTokens, options=OPTIONS, parts: int = 1) -> Trainer:
    model, reference = (build(SHAPE.config(data.vocab_size), seed=seed) for seed in (3, 4))
    return Trainer(
        model, steps=1, schedule=Cosine(warmup=0), teacher=reference, objective=OBJECTIVES.read(options),
        gradient_accumulation_steps=parts,
    )  # fmt: skip


def log_prob(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Of one answer alone, from its whole logits."""
    ids = torch.tensor([[*prompt, *answer]])
    batch = Batch(ids[:, :-1].numpy(), ids[:, 1:].numpy(), np.zeros((1, ids.shape[1] - 1), np.int32))
    tokens, targets, context = to_device(batch, torch.device("cpu"))
    logits = model.head_input(model.hidden(tokens, context))[0] @ model.head_weight.T
    return torch.log_softmax(logits, -1).gather(-1, targets[0][:, None])[len(prompt) - 1 :].sum()


def answers(batch: Batch) -> list[tuple[list[int], list[int], bool]]:
    """(prompt, answer, whether it is desirable), read from a batch row by row."""
    found = []
    for tokens, targets, ids in zip(*batch):
        for number in dict.fromkeys(ids[ids >= 0].tolist()):
            own, wanted = tokens[ids == number].tolist(), targets[ids == number]
            answer = wanted[wanted != IGNORE].tolist()
            found.append((own[: int((wanted != IGNORE).argmax()) + 1], answer, number % 2 == 0))
    return found


def others(rows):
    """Of each answer the one before it that is to another prompt; the last one is before the first."""
    return [next(one for one in [*rows[own::-1], *rows[:own:-1]] if one[0] != rows[own][0]) for own in range(len(rows))]


def formula(batch: Batch, model, reference, *, z: bool = True) -> torch.Tensor:
    """The paper's losses summed over the answers of a batch, as TRL's `kto_loss` has them but for answers to one prompt side by side."""
    rows = answers(batch)
    mixed = [(row[0], other[1]) for row, other in zip(rows, others(rows))]
    with torch.no_grad():
        kl = torch.stack([log_prob(model, *one) - log_prob(reference, *one) for one in mixed]).mean().clamp(min=0)
    total = torch.zeros(())
    for prompt, answer, desirable in rows:
        with torch.no_grad():
            known = log_prob(reference, prompt, answer)
        ratio = log_prob(model, prompt, answer) - known
        gap = ratio - kl if z else ratio
        total = total + (1.3 * (1 - torch.sigmoid(0.3 * gap)) if desirable else 0.7 * (1 - torch.sigmoid(-0.3 * gap)))
    return total


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_value_and_gradient_are_those_of_the_formula_however_a_batch_is_divided(loss, folder):
    data = PackedTokens(folder)
    batch = data.cut(np.arange(4), 64)
    for parts in (1, 2, 4):
        trainer = trainer_of(data, {**OPTIONS, "loss": loss}, parts)
        sums, counts = trainer.gradients(trainer.prepared(batch))
        ours = {name: part.grad.clone() * counts.targets for name, part in trainer.model.named_parameters()}
        trainer.model.zero_grad()
        theirs = formula(batch, trainer.model, trainer.teacher, z=loss == "kto")
        theirs.backward()
        assert counts.targets == len(answers(batch)) > 8
        assert {row[2] for row in answers(batch)} == {True, False}
        torch.testing.assert_close(sums.loss, theirs.detach(), rtol=1e-5, atol=1e-5)
        for name, part in trainer.model.named_parameters():
            torch.testing.assert_close(ours[name], part.grad, rtol=1e-3, atol=1e-5)


def test_the_reference_point_is_of_answers_to_other_prompts(folder):
    data = PackedTokens(folder)
    batch = data.cut(np.arange(2), 64)
    mixed, rows = mismatched(batch), answers(batch)
    for row, before, tokens, targets, ids in zip(rows, others(rows), *mixed):
        assert row[0] != before[0]
        whole, own = [*row[0], *before[1]], int((ids >= 0).sum())
        assert tokens[:own].tolist() == whole[:-1] and targets[targets != IGNORE].tolist() == before[1]
    trainer = trainer_of(data)
    values = trainer.prepared(batch).values
    assert values[0, 0, 1] > 0 and len(np.unique(values[..., 1])) == 1
    alone = Batch(batch.tokens[:1, :4], np.array([[IGNORE, IGNORE, 3, 4]]), np.zeros((1, 4), np.int32))
    with pytest.raises(HoneError, match="answers to two prompts"):
        trainer.prepared(alone)


def test_pairs_are_answers_too(tmp_path):
    data = PackedTokens(write_pairs(tmp_path / "pairs", num_pairs=12))
    batch = data.cut(np.arange(2), 64)
    rows, mixed = answers(batch), mismatched(batch)
    assert any(row[0] == before[0] for row, before in zip(rows[1:], rows)), "the answers of a pair have one prompt"
    for other, targets in zip(others(rows), mixed.targets):
        assert targets[targets != IGNORE].tolist() == other[1]
    assert OBJECTIVES.read("kto").count_in(data.cut(np.arange(1), 64)) == 2 * OBJECTIVES.read("dpo").count_in(
        data.cut(np.arange(1), 64)
    )


def test_an_evaluation_leaves_out_a_last_batch_of_one_answer(folder):
    val = PackedTokens(folder, "val")
    trainer = trainer_of(val)
    every = list(val.in_order(1, 12))
    alone = [len(answers(one)) for one in every]
    assert 1 in alone
    found = held_out(trainer, val, batch_size=1, seq_len=12)
    assert found.get("val_answers", 0) == sum(one for one, batch in zip(alone, every) if mismatched(batch) is not None)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_training_parts_good_answers_from_bad_ones_that_it_has_not_seen(seed, folder):
    data, val = PackedTokens(folder), PackedTokens(folder, "val")
    model = build(SHAPE.config(data.vocab_size), seed=seed)
    trainer = Trainer(
        model, steps=12, schedule=Cosine(warmup=2), optimizer=AdamW(lr=3e-3), objective=OBJECTIVES.read("kto"),
        teacher=copy.deepcopy(model),
    )  # fmt: skip
    before = held_out(trainer, val, batch_size=4, seq_len=64)
    assert before["val_answers"] == 16 and before["val_margin"] == pytest.approx(0, abs=1e-6)
    assert before["val_preference_loss"] == pytest.approx(0.5)
    for step in range(12):
        trainer.step(data.batch(step, 4, 64, seed))
    after = held_out(trainer, val, batch_size=4, seq_len=64)
    assert after["val_margin"] > 0.05 and after["val_preference_loss"] < 0.5
