"""GRPO against its formulas over whole logits, over any division of a batch, and in small trainings on sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.feed.load import IGNORE, PackedTokens
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.base import Setting
from hone.train.optimizers.adamw import AdamW
from hone.train.passes import Batch, to_device
from hone.train.rollouts.generation import Answer
from hone.train.rollouts.groups import ADVANTAGE, SHARE, advantages_of, in_rows, prompts_of
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE, write_data
from tests.train.objectives.preference.pairs import write_pairs
from tests.train.rollouts.sums import write_sums

QUIET = Run(quiet=True)
ONE_DIGIT = {"kind": "pattern", "regex": "[0-9]"}
SMALL = {"kind": "grpo", "num_generations": 4, "max_completion_length": 3}


def even(prompts, completions, answers):
    """A reward with many values, so that no group is alike."""
    return [sum(map(ord, completion)) % 7 for completion in completions]


VARIED = {**SMALL, "rewards": [{"kind": "function", "name": f"{__name__}:even"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_sums(tmp_path_factory.mktemp("made") / "data-sums")


def trainer_of(folder, options, *, parts: int = 1, lr: float = 1e-3, steps: int = 4, seed: int = 3) -> Trainer:
    data = PackedTokens(folder)
    model, reference = (build(SHAPE.config(data.vocab_size), seed=one) for one in (seed, seed + 1))
    objective = OBJECTIVES.read(options)
    return Trainer(
        model, steps=steps, schedule=Cosine(warmup=0), optimizer=AdamW(lr=lr), objective=objective,
        teacher=reference if objective.from_teacher else None, gradient_accumulation_steps=parts, setting=Setting(folder, 0),
    )  # fmt: skip


def log_probs(model, row, temperature: float) -> torch.Tensor:
    """Of each target of one row of a batch, from its whole logits, 0 where there is none."""
    tokens, targets, context = to_device(Batch(*(part[None] for part in row[:3])), torch.device("cpu"))
    logits = model.head_input(model.hidden(tokens, context))[0] @ model.head_weight.T / temperature
    found = torch.log_softmax(logits, -1).gather(-1, targets[0].clamp(min=0)[:, None])[:, 0]
    return torch.where(targets[0] != IGNORE, found, 0.0)


def formula(options, batch, model, reference, old=None) -> torch.Tensor:
    """The mean loss of a prepared batch: answer by answer, token by token, as the papers write it."""
    low, high = 1 - options.get("epsilon", 0.2), 1 + (options.get("epsilon_high") or options.get("epsilon", 0.2))
    temperature, beta = options.get("temperature", 1.0), options.get("beta", 0.0)
    losses, lengths = [], []
    for place, row in enumerate(zip(*batch)):
        new = log_probs(model, row, temperature)
        with torch.no_grad():
            before = new.detach() if old is None else log_probs(old, row, temperature)
            known = log_probs(reference, row, temperature) if beta else None
        for number in dict.fromkeys(row[2][row[2] >= 0].tolist()):
            own = torch.from_numpy((row[2] == number) & (row[1] != IGNORE))
            advantage = float(batch.values[place, own, ADVANTAGE][0])
            ratio = (new[own] - before[own]).exp()
            each = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if known is not None:
                gap = known[own] - new[own]
                each = each + beta * (gap.exp() - gap - 1)
            losses.append(each)
            lengths.append(len(each))
    kind = options.get("loss_type", "dapo")
    if kind == "grpo":
        return torch.stack([one.mean() for one in losses]).mean()
    total = torch.cat(losses).sum()
    return total / (sum(lengths) if kind == "dapo" else len(losses) * options["max_completion_length"])


@pytest.mark.parametrize(
    "more",
    [{}, {"loss_type": "grpo", "beta": 0.1}, {"loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 1.5}],
    ids=["dapo", "grpo", "dr_grpo"],
)
def test_value_and_gradient_are_those_of_the_formula_however_a_batch_is_divided(more, folder):
    options, norms = {**VARIED, **more}, []
    for parts in (1, 2):
        trainer = trainer_of(folder, options, parts=parts)
        batch = trainer.prepared(PackedTokens(folder).cut(np.arange(2), 32))
        assert len(batch.tokens) > 2 and len(batch.tokens) % (2 // parts) == 0
        assert trainer.preparer.parts == len(batch.tokens) // (2 // parts)
        sums, counts = trainer.gradients(batch)
        ours = {name: part.grad.clone() for name, part in trainer.model.named_parameters()}
        trainer.model.zero_grad()
        theirs = formula(options, batch, trainer.model, trainer.teacher)
        theirs.backward()
        assert float(sums.loss) / counts.targets == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
        for name, part in trainer.model.named_parameters():
            torch.testing.assert_close(ours[name], part.grad, rtol=1e-3, atol=1e-6)
        norms.append(float(sums.squared_norm))
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_answers_that_are_trained_on_again_are_clipped(folder):
    options = {**VARIED, "num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.1}
    trainer, data = trainer_of(folder, options, lr=0.02), PackedTokens(folder)
    old = build(trainer.model.config, seed=3)
    old.load_state_dict(trainer.model.state_dict())
    first = trainer.prepared(data.cut(np.arange(1), 32))
    trainer.step(data.cut(np.arange(1), 32))
    again = trainer.prepared(data.cut(np.arange(1, 2), 32))
    assert all((one == other).all() for one, other in zip(first, again)), "the second step has the same answers"
    sums, counts = trainer.gradients(again)
    unclipped = {**options, "epsilon": 0.99, "epsilon_high": 1e6}
    found, loose = (formula(one, again, trainer.model, None, old).item() for one in (options, unclipped))
    assert float(sums.loss) / counts.targets == pytest.approx(found, rel=1e-3, abs=1e-6)
    assert abs(found - loose) > 1e-4, "some ratios are beyond the bounds"
    state = trainer.preparer.state()
    resumed = trainer_of(folder, options)
    resumed.preparer.restore(state)
    resumed.done = 1
    assert [*resumed.preparer.row.items()] == [*trainer.preparer.row.items()] and "reward" in resumed.preparer.row
    kept = resumed.prepared(data.cut(np.arange(1, 2), 32))
    assert all((one == other).all() for one, other in zip(kept, again)) and resumed.preparer.parts == len(kept.tokens)
    resumed.preparer.restore({**state, "ranks": torch.tensor(2)})
    anew = resumed.prepared(data.cut(np.arange(1, 2), 32))
    assert anew.tokens.shape != kept.tokens.shape or (anew.tokens != kept.tokens).any(), (
        "half of what two ranks kept is not a step"
    )
    trainer.done = 2
    assert any((one != other).any() for one, other in zip(trainer.prepared(data.cut(np.arange(1), 32)), first))


def test_advantages_are_those_of_a_group():
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    tensor = torch.tensor(rewards)
    wanted = (tensor - tensor.mean(1, keepdim=True)) / (tensor.std(1, keepdim=True) + 1e-4)
    np.testing.assert_allclose(advantages_of(rewards, "group"), wanted)
    np.testing.assert_allclose(advantages_of(rewards, "none"), [[-0.5, 0.5, 0.5, -0.5], [0] * 4])


def test_answers_lie_in_rows_as_documents_of_their_own():
    prompt = np.array([5, 6, 7])
    documents = [
        (prompt, Answer([8, 9], True), 1.0),
        (prompt, Answer([8], False), -1.0),
        (prompt, Answer([4, 4, 4], True), 0.5),
    ]
    made = in_rows(documents, 8, 2)
    assert made.tokens.tolist()[0] == [5, 6, 7, 8, 5, 6, 7, 0] and made.document_ids.tolist()[0] == [0] * 4 + [
        1
    ] * 3 + [-1]
    assert made.targets.tolist()[0] == [IGNORE, IGNORE, 8, 9, IGNORE, IGNORE, 8, IGNORE]
    assert made.targets.tolist()[1][2:5] == [4, 4, 4] and made.values[1, :5, ADVANTAGE].tolist() == [0.5] * 5
    assert made.values[..., SHARE].sum() == pytest.approx(3)
    assert (in_rows(documents, 8, 2, mask_truncated=True).targets[0, 4:] == IGNORE).all()
    assert len(in_rows(documents, 8, 4).tokens) == 4


def test_a_prompt_is_what_comes_before_the_last_answer():
    ids = np.array([[0] * 8 + [1, 1]], np.int32)
    tokens = np.arange(10)[None]
    targets = np.full((1, 10), IGNORE)
    targets[0, [1, 4, 5]] = [2, 5, 6]
    (found,) = prompts_of(Batch(tokens, targets, ids), 10)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4] and found.answer.tolist() == [5, 6]
    with pytest.raises(SpecError, match="no prompt of a step leaves room"):
        prompts_of(Batch(tokens, targets, ids), 5)


def test_the_stage_raises_the_reward_and_says_what_answers_were_worth(folder, tmp_path):
    spec = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 60, "optimizer": {"lr": 3e-3}}
    data = Artifact.read(folder)
    base = Train.read(spec).make(tmp_path / "train-base", {"data": data}, QUIET)
    objective = {**SMALL, "num_generations": 8, "rewards": [ONE_DIGIT]}
    more = {"batch_size": 1, "steps": 12, "optimizer": {"lr": 2e-3}, "objective": objective, "seed": 1}
    made = Train.read({**spec, **more}).make(tmp_path / "train-grpo", {"data": data, "model": base}, QUIET)
    rows = [row for row in read_jsonl(made.folder / "steps.jsonl") if "reward" in row]
    assert len(rows) == 12 and all(0 <= row["reward"] <= 1 for row in rows)
    assert made.figures["final_reward"].value == pytest.approx(np.mean([row["reward"] for row in rows[-10:]]))
    assert sum(row["reward"] for row in rows[-3:]) > sum(row["reward"] for row in rows[:3]) + 0.1
    assert 0 <= made.figures["padding"].value < 1 and made.figures["time_s"].estimate is None


def test_what_answers_cannot_be_trained_on_is_refused(folder, tmp_path):
    spec = {"model": SHAPE.model_dump(), "batch_size": 1, "seq_len": 32, "steps": 1, "objective": SMALL}
    data, plain = Artifact.read(folder), Artifact.read(write_data(tmp_path / "plain", 20))
    pairs = Artifact.read(write_pairs(tmp_path / "pairs"))
    for parents, more, said in (
        (plain, {}, "has none"),
        (pairs, {}, "would learn both"),
        (data, {"precision": "fp8"}, "precision fp8 does not train on written answers"),
        (data, {"objective": {**SMALL, "beta": 0.1}}, "needs a teacher"),
        (data, {"objective": {**SMALL, "rewards": [{"kind": "function", "name": "no:f"}]}}, "cannot be imported"),
        (data, {"checkpoint": {"check": {"rerun_interval": 2}}}, "no other rank can compute again"),
    ):
        with pytest.raises(SpecError, match=said):
            Train.read({**spec, **more}).make(tmp_path / "train-no", {"data": parents}, QUIET)
