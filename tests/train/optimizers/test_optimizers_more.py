"""Adafactor and Lion: their steps against torch's and their definition, their state's bytes, and that they learn."""

from __future__ import annotations

import pytest
import torch

from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.train.checkpoint import Checkpoints
from hone.train.objectives.preference.measure import validate
from hone.train.optimizers.adafactor import Adafactor, AdafactorRule
from hone.train.optimizers.lion import Lion, LionRule
from hone.train.update import Update
from tests.train.conftest import SHAPE
from tests.train.optimizers.test_optimizers import draw, make, run


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (3, 8, 5), (17,)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_adafactor_is_torchs(shape, scale):
    weight, grads = draw(*shape), [scale * draw(*shape, seed=seed) for seed in range(1, 7)]
    ours, state = run(AdafactorRule(-0.8, 1e-3, 1.0), weight, grads, lr=0.02, weight_decay=0.1)
    other = torch.nn.Parameter(weight.clone())
    peer = torch.optim.Adafactor([other], lr=0.02, weight_decay=0.1)
    for grad in grads:
        other.grad = grad.clone()
        peer.step()
    torch.testing.assert_close(ours, other.detach(), rtol=1e-5, atol=1e-6)
    assert sum(part.numel() for part in state.values()) < weight.numel() or len(shape) == 1


def test_lion_is_algorithm_2_of_its_paper():
    weight, grads = draw(7, 9), [draw(7, 9, seed=seed) for seed in range(1, 6)]
    ours, state = run(LionRule(0.9, 0.99), weight, grads, lr=0.02, weight_decay=0.1)
    expected, momentum = weight.double(), torch.zeros(7, 9, dtype=torch.float64)
    for grad in grads:
        direction = (0.9 * momentum + 0.1 * grad.double()).sign()
        expected = expected - 0.02 * (direction + 0.1 * expected)
        momentum = 0.99 * momentum + 0.01 * grad.double()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [Adafactor(lr=3e-2), Lion(lr=2e-3)])
def test_they_learn_resume_and_take_the_bytes_that_the_plan_says(optimizer, data_folder, tmp_path):
    data, val = PackedTokens(data_folder), PackedTokens(data_folder, "val")
    trainer, kept = make(data, optimizer, steps=40), Checkpoints(tmp_path)
    before = validate(trainer.model, val, batch_size=8, seq_len=64)
    for step in range(37):
        trainer.step(data.batch(step, 8, 64, 0))
    trainer.save(kept)
    again = make(data, optimizer, steps=40)
    again.restore(*kept.newest())
    for step in range(37, 40):
        batch = data.batch(step, 8, 64, 0)
        assert trainer.step(batch).loss == again.step(batch).loss
    assert validate(trainer.model, val, batch_size=8, seq_len=64) < 0.7 * before
    held = sum(part.nbytes for state in trainer.update.states.values() for part in state.values())
    predicted = optimizer.cost(trainer.model.config.dims(), "float32", "cpu").state_bytes
    assert held == pytest.approx(predicted, rel=0.15)


def test_vectors_do_not_decay(data_folder):
    model = build(SHAPE.config(PackedTokens(data_folder).vocab_size))
    for optimizer in (Adafactor(), Lion()):
        decays = {
            name: group.weight_decay
            for group in Update(model, optimizer, torch.float32, accumulate=False).groups
            for name in group.names
        }
        assert decays["norm.weight"] == 0.0 and decays["layers.0.mixer.qkv.weight"] == 0.1
