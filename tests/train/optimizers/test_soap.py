"""SOAP against its paper's algorithm in float64, its first step, its long sides and its pieces."""

from __future__ import annotations

import pytest
import torch

from hone.train.optimizers.soap import SOAPRule
from tests.train.optimizers.test_optimizers import draw, run


def paper(weight: torch.Tensor, grads: list[torch.Tensor], sides: tuple[bool, bool], frequency: int) -> torch.Tensor:
    """Algorithms 3 and 4 of arXiv:2409.11321 for one matrix in float64, element by element where the paper is; `sides` are those turned."""
    lr, decay, beta1, beta2, eps = 0.02, 0.1, 0.9, 0.95, 1e-8
    weight = weight.double().clone()
    rows, columns = weight.shape
    left, right = torch.zeros(rows, rows).double(), torch.zeros(columns, columns).double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    p, q = torch.eye(rows).double(), torch.eye(columns).double()
    for count, grad in enumerate(grads):
        grad = grad.double()
        if count:
            mean = beta1 * mean + (1 - beta1) * grad
            turned = p.T @ grad @ q
            square = beta2 * square + (1 - beta2) * turned**2
            root = (square / (1 - beta2**count)) ** 0.5 + eps
            step = p @ ((p.T @ (mean / (1 - beta1**count)) @ q) / root) @ q.T
            weight = weight - lr * decay * weight - lr * step
        left = beta2 * left + (1 - beta2) * grad @ grad.T
        right = beta2 * right + (1 - beta2) * grad.T @ grad
        if count == 0:
            p, q = (
                torch.linalg.svd(one).U for one in (left, right)
            )  # of a symmetric one: its eigenvectors, largest first
        elif count % frequency == 0:
            p, q = (torch.linalg.qr(one @ basis).Q for one, basis in ((left, p), (right, q)))
        p = p if sides[0] else torch.eye(rows).double()
        q = q if sides[1] else torch.eye(columns).double()
    return weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("shape", "longest", "sides"),
    [
        ((6, 6), 100, (True, True)),
        ((11, 6), 8, (False, True)),
        ((6, 11), 8, (True, False)),
        ((9, 9), 8, (False, False)),
    ],
)
def test_it_is_the_papers_algorithm(shape, longest, sides, dtype):
    """Square ones have one basis on both sides; of a longer side the eigenvalues of zero leave theirs open, so it is not turned."""
    grads = [draw(*shape, seed=seed, dtype=dtype) for seed in range(1, 9)]
    rule = SOAPRule(0.9, 0.95, 1e-8, 3, longest)
    ours, state = run(rule, draw(*shape, dtype=dtype), grads, lr=0.02)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(ours.double(), paper(draw(*shape, dtype=dtype), grads, sides, 3), rtol=0, atol=tolerance)
    assert state["row_basis"].numel() == sides[0] * shape[0] ** 2
    assert state["column_basis"].numel() == sides[1] * shape[1] ** 2
    first, _ = run(rule, draw(*shape, dtype=dtype), grads[:1])
    assert torch.equal(first, draw(*shape, dtype=dtype)), "the first step measures the basis only"


def test_the_matrices_of_a_fused_one_and_of_a_stack_are_separate():
    rule = SOAPRule(0.9, 0.95, 1e-8, 2, 100)
    grads = [draw(12, 6, seed=seed, dtype=torch.float64) for seed in range(1, 5)]
    fused, _ = run(rule, draw(12, 6, dtype=torch.float64), grads, pieces=(6, 4, 2))
    for rows in (slice(0, 6), slice(6, 10), slice(10, 12)):
        alone, _ = run(rule, draw(12, 6, dtype=torch.float64)[rows], [grad[rows] for grad in grads])
        torch.testing.assert_close(fused[rows], alone)
    stacked, _ = run(rule, draw(12, 6, dtype=torch.float64).view(2, 6, 6), [grad.view(2, 6, 6) for grad in grads])
    alone, _ = run(rule, draw(12, 6, dtype=torch.float64)[6:], [grad[6:] for grad in grads])
    torch.testing.assert_close(stacked[1], alone)


def test_another_rounding_of_a_gradient_is_nearly_the_same_step():
    """Twelve rows of six numbers leave six directions open, which the rounding of sums must not choose."""
    rule, grads = SOAPRule(0.9, 0.95, 1e-8, 10, 100), [draw(12, 6, seed=seed) for seed in range(1, 4)]
    ours, _ = run(rule, draw(12, 6), grads)
    other, _ = run(rule, draw(12, 6), [grad + 1e-8 * draw(12, 6, seed=9) for grad in grads])
    assert (ours - other).abs().max() < 1e-5
