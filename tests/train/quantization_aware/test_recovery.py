"""A small model in 4 bits loses less when it was trained with rounded weights than when it is rounded afterwards."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hone.feed.load import Batch
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.next_token import NextToken
from hone.train.optimizers.adamw import AdamW
from hone.train.passes import to_device
from hone.train.quantization_aware import FAKE_QUANTIZERS
from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.schedules.cosine import Cosine

VOCAB, LENGTH = 64, 48
SHAPE = Shape(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, max_seq_len=64)
INT4 = {"kind": "integer", "bits": 4, "group_size": 0}
TABLE = np.random.default_rng(0).integers(VOCAB, size=(VOCAB, 8, 2))
"""Two followers of each token after each of eight kinds of tokens before it."""


def batch(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    rows = np.zeros((16, LENGTH + 1), np.int64)
    rows[:, :2] = draw.integers(VOCAB, size=(16, 2))
    for at in range(2, LENGTH + 1):
        rows[:, at] = TABLE[rows[:, at - 1], rows[:, at - 2] % 8, (draw.random(16) < 0.15).astype(int)]
    return Batch(rows[:, :-1], rows[:, 1:], np.zeros((16, LENGTH), np.int32))


def train(model: Decoder, steps: int, lr: float, first: int, **objective) -> Decoder:
    made = OBJECTIVES.read({"kind": "next_token", **objective})
    trainer = Trainer(model, steps=steps, schedule=Cosine(warmup=5), optimizer=AdamW(lr=lr), objective=made)
    for step in range(steps):
        trainer.step(batch(first + step))
    return model


@torch.no_grad()
def loss(model: Decoder, *, rounded: bool) -> float:
    model, total = copy.deepcopy(model), 0.0
    if rounded:
        RoundedLinears(model, FAKE_QUANTIZERS.read(INT4))
    for seed in range(4):
        tokens, targets, context = to_device(batch(10**6 + seed), torch.device("cpu"))
        total += NextToken().total(model, model.hidden(tokens, context), targets, None, None).item() / targets.numel()
    return total / 4


@pytest.mark.slow
def test_training_with_rounded_weights_recovers_most_of_what_rounding_costs():
    recovered = []
    for seed in range(3):
        base = train(build(SHAPE.config(VOCAB), seed=seed), 200, 6e-3, 10_000 * seed)
        plain = train(copy.deepcopy(base), 60, 1e-3, 10_000 * seed + 200)
        aware = train(copy.deepcopy(base), 60, 1e-3, 10_000 * seed + 200, quantization_aware=INT4)
        floats, after, trained = loss(plain, rounded=False), loss(plain, rounded=True), loss(aware, rounded=True)
        assert after > floats
        recovered.append((after - trained) / (after - floats))
    assert sum(recovered) / 3 >= 0.4, recovered
