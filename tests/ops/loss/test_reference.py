"""The reference of the loss against torch's, and its gradients made by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.ops.loss import reference

F64 = torch.float64


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_linear_cross_entropy_is_torchs(reduction: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "default_chunk_tokens", lambda device, vocab_size: chunk)
    x = torch.randn(3, 5, 7, dtype=F64, requires_grad=True)
    weight = torch.randn(11, 7, dtype=F64, requires_grad=True)
    targets = torch.randint(0, 11, (3, 5)).index_fill(1, torch.tensor([2]), -100)
    logits = x @ weight.T
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    valid = targets != -100
    penalty = (logits.logsumexp(-1).square() * valid).sum() / (1 if reduction == "sum" else valid.sum())
    plain = plain + 0.1 * penalty
    ours = reference.linear_cross_entropy(x, weight, targets, reduction=reduction, z_loss=0.1)
    torch.testing.assert_close(ours, plain)
    for one, two in zip(torch.autograd.grad(3 * ours, (x, weight)), torch.autograd.grad(3 * plain, (x, weight))):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        torch.testing.assert_close(
            reference.linear_cross_entropy(x, weight, targets, reduction=reduction, z_loss=0.1), plain
        )


def test_linear_cross_entropy_makes_no_gradients_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    chunk = reference._cross_entropy_chunk
    monkeypatch.setattr(reference, "_cross_entropy_chunk", lambda *given: made.append(given[-1]) or chunk(*given))
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(9, 4))
    with torch.no_grad():
        reference.linear_cross_entropy(x, weight, torch.tensor([1, 2, 3]))
    reference.linear_cross_entropy(x, weight, torch.tensor([1, 2, 3]))
    assert made == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_cross_entropy_in_half_precision_keeps_small_slopes(dtype: torch.dtype) -> None:
    x = torch.randn(40, 16).to(dtype).requires_grad_()
    weight = (torch.randn(5000, 16) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 5000, (40,))
    reference.linear_cross_entropy(x, weight, targets).backward()
    wide_x, wide_weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    loss = F.cross_entropy(wide_x @ wide_weight.T, targets)
    loss.backward()
    assert x.grad.dtype == dtype
    for ours, theirs in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (ours.float() - theirs).norm() / theirs.norm() < 0.02


def test_linear_cross_entropy_without_valid_targets() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    total = reference.linear_cross_entropy(x, weight, torch.full((4,), -100), reduction="sum")
    total.backward()
    assert total.item() == 0 and not x.grad.any() and not weight.grad.any()
