"""Teachers that a training makes itself: their weights, their losses, and that a resumed training goes on as it would have."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.train import OBJECTIVES
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from hone.train.teachers.fits import check_teacher
from tests.train.conftest import SHAPE
from tests.train.objectives.test_objectives import VOCAB, batch, model

KINDS = [
    {"teacher": "moving_average"},
    {"teacher": {"kind": "peer", "seed": 7}},
    {"teacher": "moving_average", "text": {"kind": "student", "share": 0.6, "prompt_tokens": 3}},
    {"teacher": {"kind": "peer", "seed": 7}, "text": {"kind": "teacher", "share": 0.6}},
]


def trainer(fields: dict, steps: int = 4, parts: int = 1, precision: str = "fp32") -> Trainer:
    objective = OBJECTIVES.read({"kind": "distill", "alpha": 0.5, **fields})
    how = {"gradient_accumulation_steps": parts, "precision": precision}
    return Trainer(model(0), steps=steps, schedule=Cosine(warmup=0), objective=objective, **how)


def given() -> Batch:
    tokens, targets = batch()
    return Batch(tokens.numpy(), targets.numpy(), torch.zeros_like(tokens).int().numpy())


def expected(own: torch.nn.Module, other: torch.nn.Module) -> torch.Tensor:
    """Half KL(other || own) and half the cross entropy, a mean over valid targets."""
    tokens, targets = batch()
    kept = targets.flatten() != -100
    logits = own(tokens, Causal(tokens)).flatten(0, 1)[kept]
    with torch.no_grad():
        wanted = other(tokens, Causal(tokens)).flatten(0, 1)[kept]
    apart = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    return 0.5 * apart + 0.5 * F.cross_entropy(logits, targets.flatten()[kept])


def test_a_moving_average_is_one_of_the_weights_after_each_step():
    one = trainer(KINDS[0])
    average = copy.deepcopy(one.model).state_dict()
    for step in range(1, 4):
        one.step(given())
        for name, weight in one.model.state_dict().items():
            stays = min(0.999, (1 + step) / (10 + step))
            average[name] = stays * average[name] + (1 - stays) * weight.detach()
    assert one.teacher is not None
    for name, weight in one.teacher.state_dict().items():
        torch.testing.assert_close(weight, average[name], rtol=1e-5, atol=1e-6)
    loss = expected(one.model, one.teacher)
    assert one.step(given()).loss == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
def test_peers_learn_from_the_text_and_each_other(parts):
    one = trainer(KINDS[1], parts=parts)
    peer = one.teacher
    assert peer is not None and not torch.equal(peer.embedding, one.model.embedding)
    pairs = [(one.model, peer), (peer, one.model)]
    losses = [expected(own, other) for own, other in pairs]
    wanted = [torch.autograd.grad(loss, list(own.parameters())) for loss, (own, _) in zip(losses, pairs, strict=True)]
    sums, counts = one.gradients(given())
    assert float(sums.loss / counts.targets) == pytest.approx(float(losses[0].detach()), rel=1e-5)
    for (own, _), gradients in zip(pairs, wanted, strict=True):
        for parameter, gradient in zip(own.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    before = [(one.model.embedding.detach().clone(), peer.embedding.detach().clone())]
    one.model.zero_grad(), peer.zero_grad()
    one.step(given())
    assert not torch.equal(before[0][0], one.model.embedding) and not torch.equal(before[0][1], peer.embedding)


@pytest.mark.parametrize("fields", KINDS, ids=["average", "peer", "average-on-policy", "peer-text"])
def test_a_resumed_training_is_the_one_that_was_not_ended(fields, tmp_path):
    """All on which the next step depends is in a checkpoint: a process that is killed loses nothing else."""
    whole, first, second = (trainer(fields) for _ in range(3))
    for _ in range(4):
        last = whole.step(given())
    for _ in range(2):
        first.step(given())
    checkpoints = Checkpoints(tmp_path, keep=1)
    first.save(checkpoints)
    checkpoints.finish()
    found = checkpoints.newest()
    assert found is not None
    second.restore(*found)
    second.step(given())
    assert second.step(given()).loss == last.loss
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_they_train_in_bf16():
    for fields in KINDS[:2]:
        one = trainer(fields, precision="bf16")
        assert one.teacher is not None and one.step(given()).loss > 0
        assert one.teacher.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "ranks", "said"),
    [
        ({"objective": {"kind": "distill", "teacher": "moving_average"}}, 2, "2 ranks"),
        ({"objective": {"kind": "distill", "teacher": "peer"}, "seed": 1}, 1, "seed 1 is also that of the training"),
        ({"objective": {"kind": "distill", "teacher": "peer"}, "precision": "fp16"}, 1, "no loss scale"),
        ({"objective": {"kind": "distill", "text": "student"}, "seq_len": 16}, 1, "leaves nothing to write"),
        (
            {"objective": {"kind": "distill", "text": "student"}, "checkpoint": {"check": {"rerun_interval": 2}}},
            2,
            "no rank can compute a step of another again",
        ),
        (
            {"objective": {"kind": "minilm", "teacher": "theseus"}},
            1,
            "objective minilm, which reads inside layers that may be replaced",
        ),
        (
            {"objective": {"kind": "distill", "text": "student"}, "parallelism": {"tensor_parallel_degree": 2}},
            2,
            "tensor_parallel_degree 2 has a part",
        ),
        (
            {"objective": {"kind": "distill", "text": "student"}, "parallelism": {"data_parallel": "zero3"}},
            2,
            "each rank of zero3 has a part",
        ),
        (
            {"objective": {"kind": "distill", "text": "student"}, "parallelism": {"offload": "host"}},
            1,
            "does not work with offload host",
        ),
        (
            {"objective": {"kind": "distill", "text": "student"}, "precision": "fp8"},
            1,
            "does not work with precision fp8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields, ranks, said):
    with pytest.raises(SpecError, match=said):
        check_teacher(Train.read(fields), SHAPE.config(VOCAB), ranks, [], {})


def test_text_is_written_by_a_model_that_the_engine_serves():
    shape = SHAPE.model_copy(update={"mixers": ("retnet",)})
    for kind, said in (
        ("student", "no pages for 'retnet' of the student's layer 0"),
        ("teacher", "the teacher's layer"),
    ):
        fields = {"objective": {"kind": "distill", "teacher": "moving_average", "text": kind}}
        with pytest.raises(SpecError, match=said):
            check_teacher(Train.read(fields), shape.config(VOCAB), 1, [], {})


def test_a_fixed_teacher_stays_as_it_is():
    teacher = model(1)
    before = copy.deepcopy(teacher.state_dict())
    objective = OBJECTIVES.read({"kind": "distill", "alpha": 0.5, "teacher": "fixed"})
    one = Trainer(model(0), steps=2, schedule=Cosine(warmup=0), objective=objective, teacher=teacher)
    loss = expected(one.model, teacher)
    assert one.step(given()).loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert one.teacher is teacher and not one.tutor.state()
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
