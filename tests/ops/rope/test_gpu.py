"""Rotary kernels on a GPU against float64, and into pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import rope, rope_write
from tests.ops.gpu_case import DTYPES, as_good, error, graded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "angles"), [((2, 33, 10, 128), (33,)), ((65, 40, 64), (65,)), ((2, 7, 3, 96), (2, 7))]
)
def test_rope(dtype: torch.dtype, shape: tuple[int, ...], angles: tuple[int, ...]) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 5, shape[-1], device="cuda").to(dtype)
    turn = torch.randn(*angles, 1, shape[-1] // 2, device="cuda")
    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
    as_good(
        lambda backend: lambda x: rope(x[..., 2:-3, :], cos.to(x.dtype), sin.to(x.dtype), backend=backend),
        (heads,),
    )
    turned = heads.clone()
    rope(turned[..., 2:-3, :], cos, sin, in_place=True)
    assert torch.equal(turned[..., 2:-3, :], rope(heads[..., 2:-3, :], cos, sin))
    assert torch.equal(turned[..., :2, :], heads[..., :2, :]) and torch.equal(turned[..., -3:, :], heads[..., -3:, :])


@pytest.mark.parametrize("pages_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (6, 6, 96), (1, 1, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(pages_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    count, page_size = 301, 16
    qkv = torch.randn(count, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    turn = torch.randn(count, 1, head_dim // 2, device="cuda")
    slots = torch.randperm(40 * page_size, device="cuda")[:count]
    norms = (torch.rand(2, head_dim, device="cuda") + 0.5).bfloat16()
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6} if normed else {}
    found = []
    for backend in ("triton", "reference"):
        q, k, v = (given := qkv.clone()).split([heads, kv_heads, kv_heads], 1)
        pages = torch.full((2, 40, kv_heads, page_size, head_dim), 7.0, device="cuda").to(pages_dtype)
        scales = (
            torch.full((2, 40, kv_heads, page_size), 3.0, device="cuda") if pages_dtype.itemsize == 1 else (None, None)
        )
        rope_write(
            q, k, v, turn.cos().bfloat16(), turn.sin().bfloat16(), *pages, slots // page_size, slots % page_size, *scales,
            **options, backend=backend,
        )  # fmt: skip
        known = pages.float() if scales[0] is None else pages.float() * scales[..., None]  # type: ignore[index]
        found.append((given, *known))
    assert torch.equal(found[0][0][:, heads:], qkv[:, heads:])
    for ours, plain in zip(*found):
        assert error(ours, plain.double()) < 5e-3


def test_rope_in_a_compiled_graph_and_outside() -> None:
    x = torch.randn(2, 65, 6, 64, device="cuda", dtype=torch.bfloat16)
    turn = torch.randn(65, 1, 32, device="cuda")
    cos, sin = turn.cos().bfloat16(), turn.sin().bfloat16()

    def run(x: Tensor) -> Tensor:
        return rope(x, cos, sin) * 2

    exact = graded(lambda x: rope(x, cos.double(), sin.double(), backend="reference") * 2, x.double())
    for found in (graded(run, x), graded(torch.compile(run, fullgraph=True), x)):
        for one, truth in zip(found, exact):
            assert error(one, truth) < 1e-2
    trained = graded(run, x)[0]
    with torch.no_grad():
        assert torch.equal(run(x), trained)
