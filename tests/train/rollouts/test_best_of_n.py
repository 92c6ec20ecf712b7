"""Best-of-n: the best answers alone are trained on, by their cross entropy, and rewards of a model are its scores of whole texts."""

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
from hone.model.hf import load, save
from hone.train import OBJECTIVES
from hone.train.rollouts import REWARDS
from hone.train.rollouts.groups import prompts_of
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.rollouts.sums import write_sums
from tests.train.rollouts.test_grpo import ONE_DIGIT, VARIED, even, log_probs, trainer_of

SMALL = {**VARIED, "kind": "best_of_n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_sums(tmp_path_factory.mktemp("made") / "data-sums")


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """The folder of a reward model with the tokenizer of the data."""
    where = tmp_path_factory.mktemp("judge")
    save(build(SHAPE.config(PackedTokens(folder).vocab_size).scoring(), seed=7), where, tokenizer_from=folder)
    return where


def test_the_best_answers_of_each_group_are_what_is_trained_on(folder):
    data = PackedTokens(folder)
    batch = data.cut(np.arange(1), 32)
    trainer = trainer_of(folder, SMALL)
    made = trainer.prepared(batch)
    prompts = prompts_of(batch, 32)
    answers = trainer.preparer.written(trainer, prompts, 32, 4, 1.0)
    texts = [trainer.preparer.tokenizer.decode(one.tokens) for one in answers]
    worth = np.array(even(None, texts, None), float).reshape(-1, 4)
    best = [answers[4 * group + int(row.argmax())].tokens for group, row in enumerate(worth)]
    found = [
        targets[(targets != IGNORE) & (ids == number)].tolist()
        for targets, ids in zip(made.targets, made.document_ids)
        for number in range(int(ids.max()) + 1)
    ]
    assert found == best and len(best) == len(prompts) > 1
    assert trainer.preparer.row["reward"] == pytest.approx(worth.mean())
    sums, counts = trainer.gradients(made)
    assert counts.targets == sum(map(len, best))
    wanted = -sum(log_probs(trainer.model, row, 1.0).sum() for row in zip(*made[:3]))
    assert float(sums.loss) == pytest.approx(wanted.item(), rel=1e-4)


def test_prompts_without_a_good_answer_are_left_out():
    objective = OBJECTIVES.read({**SMALL, "min_reward": 1})
    advantages, kept = objective.chosen(np.array([[0.0, 1, 1], [0, 0.5, 0]]))
    assert kept.tolist() == [[False, True, False], [False] * 3] and advantages.tolist() == kept.astype(float).tolist()


def test_a_step_without_any_good_answer_changes_nothing_but_by_its_optimizer(folder):
    trainer = trainer_of(folder, {**SMALL, "min_reward": 99})
    made = trainer.prepared(PackedTokens(folder).cut(np.arange(1), 32))
    sums, _ = trainer.gradients(made)
    assert (made.targets == IGNORE).all() and float(sums.loss) == 0 == float(sums.squared_norm)


def test_the_reward_of_a_model_is_its_score_of_each_text_alone(judge):
    reward = REWARDS.read({"kind": "reward_model", "model": str(judge)})
    reward.check()
    model, draw = load(judge, scores=True), np.random.default_rng(0)
    rows = [draw.integers(0, 60, size).tolist() for size in (3, 9, 1, 9, 5)]
    with torch.no_grad():
        wanted = [float(model(torch.tensor([row]))[0, -1, 0]) for row in rows]
    assert reward.token_scores(rows, "cpu") == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_a_reward_model_that_is_none_is_refused(judge, folder, tmp_path):
    for model, said in (("", "no folder of a model"), (str(tmp_path / "language"), "language model")):
        if model:
            save(build(SHAPE.config(64), seed=1), model)
        with pytest.raises(SpecError, match=said):
            REWARDS.read({"kind": "reward_model", "model": model}).check()
    reward = REWARDS.read({"kind": "reward_model", "model": str(judge)})
    with pytest.raises(SpecError, match="tokenize differently"):
        reward.check_tokenizer("another", "data")


def test_the_stage_raises_the_reward(folder, judge, tmp_path):
    spec = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 60, "optimizer": {"lr": 3e-3}}
    data, quiet = Artifact.read(folder), Run(quiet=True)
    base = Train.read(spec).make(tmp_path / "train-base", {"data": data}, quiet)
    rewards = [ONE_DIGIT, {"kind": "reward_model", "model": str(judge), "weight": 0.01}]
    objective = {**SMALL, "num_generations": 8, "rewards": rewards}
    more = {"batch_size": 1, "steps": 30, "optimizer": {"lr": 5e-3}, "objective": objective, "seed": 1}
    made = Train.read({**spec, **more}).make(tmp_path / "train-best", {"data": data, "model": base}, quiet)
    rows = [row for row in read_jsonl(made.folder / "steps.jsonl") if "loss" in row]
    told = [row["reward_0_pattern"] for row in rows]
    assert np.mean(told[-6:]) > np.mean(told[:6]) + 0.1 and "reward_1_reward_model" in rows[0]


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(folder, tmp_path):
    model = SHAPE.model_copy(update={"num_layers": 2}).model_dump()
    spec = {"model": model, "batch_size": 1, "seq_len": 32, "steps": 10, "checkpoint": {"interval": 3}}
    spec["objective"] = {**SMALL, "rewards": [{"kind": "pattern", "regex": "[ -~]*"}]}
    whole = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(folder)}, Run(quiet=True)).content
    assert content_after_kills(spec, folder, tmp_path / "train-killed", [4, 8]) == whole
