"""Every conversion can be trained: a few steps on one batch, taught by the given model, bring its predictions nearer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.feed.load import Batch
from hone.model.hf import load
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

STEPS = [
    {"kind": "gqa", "num_kv_heads": 1},
    {"kind": "transmla", "kv_rank": 16},
    {"kind": "transmla", "latent_norm": False, "kv_rank": 8},
    {"kind": "linearize", "layers": [1]},
    {"kind": "extend_context", "factor": 2.0},
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step['kind']}-{len(step)}")
def test_a_converted_model_learns_from_the_given_one(step: dict, family_folder, compress, calibration_text) -> None:
    folder = family_folder("llama")
    made = compress(folder, step, calibration_text=str(calibration_text), num_sequences=4, check_sequences=0).folder
    length = 160 if step["kind"] == "extend_context" else 48  # the given model has a context of 128
    tokens = (np.arange(2 * length, dtype=np.int64).reshape(2, length) * 13 + 5) % 250
    objective = {"kind": "hidden_states" if step["kind"] == "linearize" else "distill", "alpha": 1.0}
    trainer = Trainer(
        load(made, dtype=torch.float32),
        steps=8,
        schedule=Cosine(),
        optimizer=AdamW(lr=2e-3),
        objective=OBJECTIVES.read(objective),
        teacher=load(folder, dtype=torch.float32),
    )
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((2, length - 1), np.int32))
    losses = [trainer.step(batch).loss for _ in range(8)]
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
