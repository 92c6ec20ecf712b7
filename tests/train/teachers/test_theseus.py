"""Layers of a teacher that stand in for the student's: which, when, and what of it is in evaluations and in the saved model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.feed_forwards import FEED_FORWARDS
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from hone.train.teachers import TEACHERS
from tests.train.conftest import SHAPE
from tests.train.objectives.test_objectives import VOCAB, batch, model

DEEP = SHAPE.model_copy(update={"num_layers": 8})


def given() -> Batch:
    tokens, targets = batch()
    return Batch(tokens.numpy(), targets.numpy(), np.zeros((3, 20), np.int32))


@pytest.mark.parametrize("segments", ["none", "full"])
def test_a_step_is_one_through_the_layers_that_were_drawn(segments):
    spec = {"kind": "theseus", "first": 0.5, "until": 1.0, "seed": 3}
    objective = OBJECTIVES.read({"kind": "distill", "alpha": 0.0, "teacher": spec})
    teacher, student = build(DEEP.config(VOCAB), seed=5), model(0)
    plain = copy.deepcopy(student)
    how = {"activation_checkpointing": ACTIVATION_CHECKPOINTINGS.read(segments), "teacher": teacher}
    one = Trainer(student, steps=40, schedule=Cosine(warmup=0), objective=objective, **how)
    own = [objective.teacher.own(0, 40, layer) for layer in range(4)]
    assert 0 < sum(own) < 4
    tokens, targets = batch()
    context = Causal(tokens)
    x = plain.embed(tokens)
    plain.prepare(x, context)
    for index, layer in enumerate(plain.layers):
        for part in [layer] if own[index] else teacher.layers[2 * index : 2 * index + 2]:
            x = part(x, context)
    loss = F.cross_entropy(plain.head(x).flatten(0, 1), targets.flatten())
    loss.backward()
    sums, counts = one.gradients(given())
    assert float(sums.loss / counts.targets) == pytest.approx(float(loss.detach()), rel=1e-5)
    for (name, ours), other in zip(student.named_parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(ours) if other.grad is None else other.grad
        torch.testing.assert_close(ours.grad, wanted, rtol=1e-3, atol=1e-6, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(student(tokens), plain(tokens))  # an evaluation is of the student alone


def test_the_students_layers_become_more_until_there_are_no_others():
    spec = TEACHERS.read({"kind": "theseus", "first": 0.2, "until": 0.5})
    shares = [sum(spec.own(step, 100, layer) for layer in range(200)) / 200 for step in (0, 25, 49, 50, 99)]
    assert shares[0] == pytest.approx(0.2, abs=0.12) and shares[1] == pytest.approx(0.6, abs=0.15)
    assert shares[2] > 0.9 and shares[3:] == [1, 1]


def test_layers_that_do_not_fit_are_refused():
    spec = TEACHERS.read("theseus")
    config = SHAPE.config(VOCAB)
    spec.check_models(config, DEEP.config(VOCAB))
    with pytest.raises(SpecError, match="width 64 among those of width 48"):
        spec.check_models(config, SHAPE.model_copy(update={"hidden_size": 64}).config(VOCAB))
    with pytest.raises(SpecError, match="6 layers are no equal groups for 4"):
        spec.check_models(config, SHAPE.model_copy(update={"num_layers": 6}).config(VOCAB))
    experts = FEED_FORWARDS.read({"kind": "moe", "intermediate_size": 12, "num_experts": 4})
    layers = tuple(one.model_copy(update={"feed_forward": experts}) for one in config.layers)
    with pytest.raises(SpecError, match="experts are balanced by the tokens that come to them"):
        spec.check_models(config.model_copy(update={"layers": layers}), DEEP.config(VOCAB))
