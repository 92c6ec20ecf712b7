"""The reference ops against their definitions written another way, and their hand-written gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hone.ops import lean, reference
from hone.ops.attention import masks

F64 = torch.float64


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attend_is_the_definition(window: int | None) -> None:
    q, k, v = torch.randn(2, 6, 4, 8, dtype=F64), *torch.randn(2, 2, 6, 2, 8, dtype=F64)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    out, lse = reference.attend(q, k, v, masks.documents(ids, window), scale=0.7)
    for row, place, head in [(0, 0, 0), (0, 4, 3), (0, 5, 1), (1, 5, 2), (1, 3, 0)]:
        seen = [
            other
            for other in range(place + 1)
            if ids[row, other] == ids[row, place] and (window is None or place - other < window)
        ]
        scores = [math.exp(0.7 * float(q[row, place, head] @ k[row, other, head // 2])) for other in seen]
        want = sum(score * v[row, other, head // 2] for score, other in zip(scores, seen)) / sum(scores)
        torch.testing.assert_close(out[row, place, head], want)
        torch.testing.assert_close(lse[row, head, place], torch.tensor(math.log(sum(scores)), dtype=F64))


def test_rope_turns_pairs_and_keeps_relative_angles() -> None:
    x, y = torch.randn(2, 1, 8, dtype=F64)
    frequencies = 10.0 ** -torch.arange(4, dtype=F64)

    def at(vector: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * frequencies
        return reference.rope(vector, angles.cos()[None], angles.sin()[None])

    turned = at(x, 3)
    pair = torch.complex(x[0, 1], x[0, 5]) * torch.polar(torch.ones((), dtype=F64), 3 * frequencies[1])
    torch.testing.assert_close(torch.stack([turned[0, 1], turned[0, 5]]), torch.view_as_real(pair))
    torch.testing.assert_close((at(x, 9) * at(y, 4)).sum(), (at(x, 5) * at(y, 0)).sum())


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_lean_twins_agree_with_the_reference(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.rand(16).to(dtype)
    cos, sin = torch.randn(2, 3, 1, 8).to(dtype)
    close = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    cases = [
        (lean.rms_norm, reference.rms_norm, (x, weight, 1e-5)),
        (lean.rope, reference.rope, (x, cos, sin)),
        (lean.swiglu, reference.swiglu, (x,)),
    ]
    for fast, plain, inputs in cases:
        torch.testing.assert_close(fast(*inputs), plain(*inputs), **close)
        results = []
        for op in (fast, plain):
            leaf = x.clone().requires_grad_()
            out = op(leaf, *inputs[1:])
            out.square().sum().backward()
            assert out.dtype == dtype
            results.append(leaf.grad)
        torch.testing.assert_close(*results, **close)


def test_lean_gradients() -> None:
    x, weight = torch.randn(2, 3, 8, dtype=F64, requires_grad=True), torch.rand(8, dtype=F64, requires_grad=True)
    cos, sin = torch.randn(2, 2, 1, 4, dtype=F64)
    assert torch.autograd.gradcheck(lambda a, b: lean.rms_norm(a, b, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda a: lean.rope(a, cos, sin), (x,))
    assert torch.autograd.gradcheck(lean.swiglu, (x,))


def test_rms_norm_and_swiglu_are_torchs() -> None:
    x, weight = torch.randn(4, 12, dtype=F64), torch.rand(12, dtype=F64)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-4), F.rms_norm(x, (12,), weight, 1e-4))
    torch.testing.assert_close(reference.swiglu(x), F.silu(x[:, :6]) * x[:, 6:])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_linear_cross_entropy_is_torchs(reduction: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "chunk_rows", lambda device, vocab_size: rows)
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


def test_the_norm_keeps_its_inputs_dtype_whatever_the_weights() -> None:
    x, weight = torch.randn(3, 16).bfloat16(), torch.rand(16)
    assert reference.rms_norm(x, weight, 1e-5).dtype == lean.rms_norm(x, weight, 1e-5).dtype == torch.bfloat16
    torch.testing.assert_close(
        lean.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=0.02, rtol=0.01
    )


def test_what_has_a_gradient_by_hand_has_a_second_one_or_says_so() -> None:
    x, weight = torch.randn(3, 8, dtype=F64, requires_grad=True), torch.rand(8, dtype=F64, requires_grad=True)
    targets = torch.tensor([1, 0, 7])
    for run in (
        lambda: lean.rms_norm(x, weight, 1e-5),
        lambda: lean.swiglu(x),
        lambda: reference.linear_cross_entropy(x, torch.eye(8, dtype=F64), targets),
    ):
        # A loss whose gradient depends on its upstream, as a penalty on gradients has it.
        (slope,) = torch.autograd.grad(run().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()
    angles = torch.randn(3, 1, 2, dtype=F64)
    assert torch.autograd.gradgradcheck(lambda one: lean.rope(one.view(3, 2, 4), angles.cos(), angles.sin()), x)
