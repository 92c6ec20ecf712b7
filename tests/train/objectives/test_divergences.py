"""Divergences of distillation against their definitions in float64, and vocabularies that differ in padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.ops import linear_cross_entropy
from hone.ops.loss.reference import Teacher
from hone.parallel.axis import Axis
from hone.train.inputs import same_vocabulary
from hone.train.objectives import distill_loss as module
from hone.train.objectives.divergences import DIVERGENCES
from tests.train.conftest import SHAPE
from tests.train.objectives.test_distill_loss import inputs


def kl(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one / other).log()).sum(-1)


DEFINED = {
    "forward_kl": lambda p, q: kl(p, q),
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: 0.3 * kl(p, 0.3 * p + 0.7 * q) + 0.7 * kl(q, 0.3 * p + 0.7 * q),
    "skew_kl": lambda p, q: kl(p, 0.2 * p + 0.8 * q),
    "skew_reverse_kl": lambda p, q: kl(q, 0.2 * q + 0.8 * p),
}
FIELDS = {"jsd": {"beta": 0.3}, "skew_kl": {"skew": 0.2}, "skew_reverse_kl": {"skew": 0.2}}


def computed(kind: str):
    return DIVERGENCES.read({"kind": kind, **FIELDS.get(kind, {})}).computed()


def oracle(kind, x, weight, taught, teacher, targets, alpha, temperature, shared=None, caps=(None, None)):
    valid = targets != -100
    student, wanted = (
        one if cap is None else cap * torch.tanh(one / cap)
        for one, cap in zip(((x @ weight.T)[valid], (taught @ teacher.T)[valid]), caps, strict=True)
    )
    p, q = (F.softmax(one[:, :shared] / temperature, -1) for one in (wanted, student))
    text = F.cross_entropy(student, targets[valid], reduction="sum")
    return alpha * temperature**2 * DEFINED[kind](p, q).sum() + (1 - alpha) * text


def values(function, x, weight):
    """The loss and its gradients by both."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = function(*leaves)
    (0.7 * loss).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"])
@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (0.6, 2.5)])
def test_values_and_gradients_are_those_of_the_definition(kind, alpha, temperature, monkeypatch):
    monkeypatch.setattr(module, "default_chunk_tokens", lambda device, vocab: 8)  # several chunks, the last one short
    x, weight, taught, teacher, targets = inputs()
    options = {"alpha": alpha, "temperature": temperature}
    caps = (5.0, 9.0)
    how = {"divergence": computed(kind), "softcaps": caps}
    ours = values(lambda a, b: module.distill_loss(a, b, taught, teacher, targets, **options, **how), x, weight)
    theirs = values(lambda a, b: oracle(kind, a, b, taught, teacher, targets, alpha, temperature, caps=caps), x, weight)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    # As ranks compute it that have parts of the vocabulary; here one has all of it.
    divided = {"divided": (Axis([0], 0), 0), **how}
    parts = values(lambda a, b: module.distill_loss(a, b, taught, teacher, targets, **options, **divided), x, weight)
    for one, other in zip(parts, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("pads", ["student", "teacher"])
def test_vocabularies_that_differ_in_padding_are_compared_over_the_ids_of_both(kind, pads):
    x, weight, taught, teacher, targets = inputs()
    cut = 40
    targets = targets.clamp(max=cut - 1)
    if pads == "student":
        teacher = teacher[:cut]
    else:
        weight = weight[:cut]
    options = {"alpha": 0.6, "temperature": 2.0, "divergence": computed(kind)}
    ours = values(lambda a, b: module.distill_loss(a, b, taught, teacher, targets, **options), x, weight)
    theirs = values(lambda a, b: oracle(kind, a, b, taught, teacher, targets, 0.6, 2.0, shared=cut), x, weight)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_tokens_that_one_finds_impossible_give_finite_losses():
    x, weight, taught, teacher, targets = inputs(torch.float32)
    for kind in DEFINED:
        how = {"alpha": 1.0, "temperature": 1.0, "divergence": computed(kind)}
        found = values(
            lambda a, b, how=how: module.distill_loss(a, b, 40 * taught, teacher, targets, **how), 40 * x, weight
        )
        assert all(torch.isfinite(one).all() for one in found), kind


def test_an_op_without_shared_ids_says_how_to_give_them():
    x, weight, taught, teacher, targets = inputs()
    with pytest.raises(SpecError, match="shared_vocab=40") as caught:
        linear_cross_entropy(x, weight, targets, teacher=Teacher(taught, teacher[:40], 1.0))
    assert "50 tokens of the student's" in str(caught.value)
    with pytest.raises(SpecError, match="shared_vocab is 60"):
        linear_cross_entropy(x, weight, targets, teacher=Teacher(taught, teacher, 1.0, shared_vocab=60))


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_jsd_are_kinds_of_their_own(beta):
    with pytest.raises(SpecError, match="beta"):
        DIVERGENCES.read({"kind": "jsd", "beta": beta})


def test_a_student_with_more_ids_than_its_teacher_needs_a_tokenizer_that_says_so():
    config = ModelConfig.read(SHAPE.config(300).model_dump(mode="json"))
    teacher = CheckpointFacts(where="big", config=SHAPE.config(320), dtype="float32", weights_bytes=1, tokenizer="a")
    data = SimpleNamespace(tokenizer="a", where="text")
    same_vocabulary(config, teacher, data, 1)
    with pytest.raises(SpecError, match="tensor-parallel ranks would have different tokens"):
        same_vocabulary(config, teacher, data, 2)
    with pytest.raises(SpecError, match="without the tokenizers of big and the data none can tell"):
        same_vocabulary(config, teacher.model_copy(update={"tokenizer": None}), data, 1)
