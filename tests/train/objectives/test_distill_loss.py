"""The chunked distillation loss against torch's own functions on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.train.objectives import distill_loss as module


def inputs(dtype=torch.float64, tokens=37, vocab=50):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[::5] = -100
    return draw(tokens, 16), draw(vocab, 16), draw(tokens, 24), draw(vocab, 24), targets


def oracle(x, weight, taught, teacher, targets, alpha, temperature):
    valid = targets != -100
    student, teacher = (x @ weight.T)[valid], (taught @ teacher.T)[valid]
    soft = F.kl_div(F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="sum")
    text = F.cross_entropy(student, targets[valid], reduction="sum")
    return alpha * temperature**2 * soft + (1 - alpha) * text


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_value_and_gradients(alpha, temperature, monkeypatch):
    monkeypatch.setattr(module, "default_chunk_tokens", lambda device, vocab: 8)  # several chunks, the last one short
    x, weight, taught, teacher, targets = inputs()
    ours, theirs = [], []
    for function, kept in ((module.distill_loss, ours), (oracle, theirs)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        if function is oracle:
            loss = oracle(*leaves, taught, teacher, targets, alpha, temperature)
        else:
            loss = function(*leaves, taught, teacher, targets, alpha=alpha, temperature=temperature)
        (loss * 0.7).backward()
        kept += [loss.detach(), *(leaf.grad for leaf in leaves)]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_alpha_zero_is_cross_entropy():
    from hone.ops.loss.reference import linear_cross_entropy

    x, weight, taught, teacher, targets = inputs()
    ours = module.distill_loss(x, weight, taught, teacher, targets, alpha=0.0, temperature=3.0)
    assert ours.item() == pytest.approx(linear_cross_entropy(x, weight, targets, reduction="sum").item(), rel=1e-12)


def test_a_student_that_is_its_teacher_loses_nothing():
    x, weight, _, _, targets = inputs()
    x.requires_grad_()
    loss = module.distill_loss(x, weight, x.detach(), weight, targets, alpha=1.0, temperature=2.0)
    loss.backward()
    assert abs(loss.item()) < 1e-10 and x.grad.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_point_the_same_way(dtype):
    exact = inputs()
    half = [part.to(dtype) if part.is_floating_point() else part for part in exact]
    grads = []
    for x, weight, taught, teacher, targets in (exact, half):
        x = x.clone().requires_grad_()
        module.distill_loss(x, weight, taught, teacher, targets, alpha=0.5, temperature=2.0).backward()
        grads.append(x.grad.double())
    assert F.cosine_similarity(grads[0].flatten(), grads[1].flatten(), 0) > 0.999
