"""The loss's kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops import linear_cross_entropy
from hone.ops.loss.reference import Teacher
from hone.ops.loss.rows import row_gradients_, row_sums
from tests.ops.agree import agree, graded


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.2}, {"teacher": 2.0}, {"teacher": 1.0, "z_loss": 0.1}]
)
def test_loss(reduction: str, options: dict) -> None:
    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(77, 24, requires_grad=True)
    targets = torch.randint(0, 77, (13,))
    targets[3] = -100
    if "teacher" in options:
        options = {**options, "teacher": Teacher(torch.randn(13, 8), torch.randn(77, 8), 0.4, options["teacher"])}

    def run(backend: str) -> list[torch.Tensor]:
        loss = linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_tokens=5, backend=backend, **options)
        return graded(loss, x, weight)

    agree(run)
    with torch.no_grad():
        agree(lambda backend: [linear_cross_entropy(x, weight, targets, chunk_tokens=5, backend=backend, **options)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loss_without_valid_targets(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 6).to(dtype).requires_grad_(), torch.randn(9, 6).to(dtype).requires_grad_()
    total = linear_cross_entropy(x, weight, torch.full((4,), -100), reduction="sum", backend="triton")
    total.backward()
    assert total.item() == 0 and not x.grad.any() and not weight.grad.any()


def test_loss_in_a_graph() -> None:
    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(77, 24, requires_grad=True)
    targets = torch.randint(0, 77, (13,))

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, targets, chunk_tokens=5, backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(*(graded(way(x, weight), x, weight) for way in (compiled, run)), strict=True):
        torch.testing.assert_close(ours, plain)


def test_rows_that_devices_share_by_columns() -> None:
    logits, targets = 3 * torch.randn(13, 77), torch.randint(0, 77, (13,))
    valid = torch.ones(13, dtype=torch.bool)
    valid[3] = False
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (losses * valid).sum().backward()
    for backend in ("triton", "reference"):
        parts = [logits[:, :40].clone(), logits[:, 40:].clone()]
        sums = torch.stack([row_sums(part, targets - 40 * i, backend=backend) for i, part in enumerate(parts)])
        log_sum, chosen = sums[:, 0].logsumexp(0), sums[:, 1].sum(0)
        torch.testing.assert_close((log_sum - chosen).double(), losses, rtol=0, atol=1e-5)
        slopes = [
            row_gradients_(part, targets - 40 * i, log_sum, valid, backend=backend) for i, part in enumerate(parts)
        ]
        torch.testing.assert_close(torch.cat(slopes, 1).double(), exact.grad, rtol=0, atol=1e-6)
