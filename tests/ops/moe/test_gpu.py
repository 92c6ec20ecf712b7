"""Kernels that sort tokens by expert, and products of few tokens, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hone.ops import grouped_linear, permute, unpermute
from tests.ops.gpu_case import as_good, error, graded, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width"), [(1, 8, 256, 2048), (3, 2, 8, 100), (5000, 6, 64, 512)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_permute_and_back(tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weights = torch.rand(tokens, top_k, device="cuda").to(dtype)
    ids = torch.randint(0, experts, (tokens, top_k), device="cuda")
    ids[:, 0] = 1

    def layer(backend: str) -> Callable[..., Tensor]:
        def run(x: Tensor, weights: Tensor) -> Tensor:
            rows, _, place = permute(x, ids, experts, backend=backend)
            return unpermute(rows * 2, place, weights, backend=backend)

        return run

    as_good(layer, (x, weights))
    for ours, plain in zip(*(permute(x, ids, experts, backend=name) for name in ("triton", "reference"))):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("experts", "out", "width", "most"), [(128, 1536, 2048, 16), (64, 100, 264, 40), (16, 24, 41, 17)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_tokens(experts: int, out: int, width: int, most: int, dtype: torch.dtype) -> None:
    ends = torch.randint(0, most + 1, (experts,), device="cuda").cumsum(0).int()
    x = torch.randn(int(ends[-1]), width, device="cuda").to(dtype)
    weight = torch.randn(experts, out, width, device="cuda").to(dtype)
    poison()
    ours = grouped_linear(x, weight, ends)
    exact = grouped_linear(x.double(), weight.double(), ends, backend="reference")
    assert torch.equal(ours, grouped_linear(x, weight, ends, backend="triton"))
    assert error(ours, exact) < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize(
    ("sizes", "out", "width"),
    [
        ((100, 0, 128, 284), 128, 64),
        ((1, 63, 64, 65, 0), 264, 200),  # tiles of few rows, the last features of a tile
        ((0, 0, 700), 1408, 2048),
        ((40,) * 200, 136, 72),
        ((0, 0), 128, 64),
    ],
)
@pytest.mark.parametrize("backend", ["gluon", "torch"])
def test_training_is_the_loop(sizes: tuple[int, ...], out: int, width: int, backend: str) -> None:
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    x, weight = torch.randn(sum(sizes), width, device="cuda"), torch.randn(len(sizes), out, width, device="cuda")
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    exact = graded(lambda a, b: grouped_linear(a, b, ends, backend="reference"), x.double(), weight.double())
    poison()
    found = graded(lambda a, b: grouped_linear(a, b, ends, backend=backend), x.bfloat16(), weight.bfloat16())
    for one, truth in zip(found, exact, strict=True):
        assert error(one, truth) < 1e-2


def test_an_experts_gradient_has_nothing_of_the_next_experts_rows() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    ends = torch.tensor([70, 200], device="cuda", dtype=torch.int32)
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    flow = torch.randn(200, 128, device="cuda", dtype=torch.bfloat16)
    flow[70:] = float("inf")
    leaf = weight.requires_grad_()
    (found,) = torch.autograd.grad(grouped_linear(x, leaf, ends, backend="gluon"), leaf, flow)
    assert torch.isfinite(found[0]).all()
    assert not torch.isfinite(found[1]).all()
