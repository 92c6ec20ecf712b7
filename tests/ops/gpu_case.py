"""How tests on a GPU judge a kernel: poisoned memory, errors against float64, two runs bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def poison() -> None:
    """Leaves memory that the next allocations reuse full of not-a-numbers: what a kernel does not write shows."""
    held = [torch.full((1 << size,), float("nan"), device="cuda") for size in (8, 12, 16, 20, 22) for _ in range(4)]
    del held


def graded(op: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = op(*leaves)
    flow = torch.arange(out.numel(), device="cuda", dtype=torch.float64).cos().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, flow)]


def as_good(op: Callable[[str], Callable[..., Tensor]], inputs: Sequence[Tensor], plain: str = "reference") -> None:
    """The kernel's error is at most twice that of plain torch in the same dtype, and two runs agree bit for bit."""
    poison()
    first = graded(op("triton"), *inputs)
    poison()
    second = graded(op("triton"), *inputs)
    eager = graded(op(plain), *inputs)
    exact = graded(op("reference"), *(one.double() for one in inputs))
    for one, two, same, truth in zip(first, second, eager, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, truth) <= 2 * error(same, truth) + 1e-5
