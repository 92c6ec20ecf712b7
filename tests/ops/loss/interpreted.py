"""The loss's kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops import linear_cross_entropy
from hone.ops.loss.reference import Teacher
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
