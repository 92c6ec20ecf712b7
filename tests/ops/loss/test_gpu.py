"""The loss's kernels on a GPU against float64: memory, gradients, graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import linear_cross_entropy, rms_norm
from hone.ops.loss.reference import Teacher
from hone.ops.loss.rows import row_gradients_, row_sums
from tests.ops.gpu_case import DTYPES, error, graded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "vocab", "options"),
    [
        (1, 64, 1000, {}),
        (1300, 128, 5003, {"z_loss": 1e-3}),
        (257, 64, 32000, {"label_smoothing": 0.1, "chunk_tokens": 100}),
        (300, 128, 5003, {"teacher": 2.0, "chunk_tokens": 128}),
        (
            300,
            128,
            5003,
            {"teacher": 1.0, "reduction": "sum", "chunk_tokens": 20},
        ),  # more chunks than are summed in bf16
    ],
)
def test_loss(dtype: torch.dtype, tokens: int, width: int, vocab: int, options: dict) -> None:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weight = (torch.randn(vocab, width, device="cuda") * 0.1).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    targets[1::7] = -100
    hidden, teacher = torch.randn(tokens, 96, device="cuda").to(dtype), torch.randn(vocab, 96, device="cuda").to(dtype)

    def loss(backend: str) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            given = dict(options)
            if "teacher" in given:
                given["teacher"] = Teacher(hidden.to(x.dtype), teacher.to(x.dtype) * 0.1, 0.6, given["teacher"])
            return linear_cross_entropy(x, weight, targets, backend=backend, **given)

        return run

    found = [graded(loss("triton"), x, weight) for _ in range(2)]
    exact = graded(loss("reference"), x.double(), weight.double())
    close = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for one, two, truth in zip(*found, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, truth) < close


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_devices_share_by_columns(dtype: torch.dtype) -> None:
    logits, targets = (
        (4 * torch.randn(300, 5003, device="cuda")).to(dtype),
        torch.randint(0, 5003, (300,), device="cuda"),
    )
    valid = torch.rand(300, device="cuda") < 0.8
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (losses * valid).sum().backward()
    parts = [logits[:, :2001].clone(), logits[:, 2001:].clone()]
    places = [targets, targets - 2001]
    sums = torch.stack([row_sums(*one, backend="triton") for one in zip(parts, places, strict=True)])
    log_sum, chosen = sums[:, 0].logsumexp(0), sums[:, 1].sum(0)
    found = [row_gradients_(*one, log_sum, valid, backend="triton") for one in zip(parts, places, strict=True)]
    assert error(log_sum - chosen, losses) < 1e-5
    assert (
        error(torch.cat(found, 1), exact.grad) < {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    )


def test_loss_memory_is_an_eighth_and_gradients_are_not_copied() -> None:
    tokens, width, vocab = 8192, 256, 32000
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    for _ in range(2):  # the first call also fetches the libraries' workspaces
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward()
        grown = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + weight.numel())
    assert grown <= tokens * vocab * 2 / 8 + (1 << 20)
    with pytest.raises(SpecError, match="compute the loss again"):
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward(retain_graph=True)
        loss.backward()


def test_loss_and_norm_under_compile() -> None:
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(999, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.rand(64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 999, (300,), device="cuda")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(rms_norm(x, scale, 1e-5), weight, targets, chunk_tokens=128)

    eager, compiled = graded(run, x, weight), graded(torch.compile(run, fullgraph=True), x, weight)
    for one, two in zip(eager, compiled):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-3)
