"""The Hopper attention forward where its own ways could fail: the order of tiles, tiles that see nothing, growing scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import attend
from hone.ops.attention import masks, reference
from hone.ops.attention.masks import CAUSAL, FULL, Mask
from hone.ops.dispatch import locate

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not locate("cuda").runs_gluon:
        pytest.skip("Gluon kernels need compute capability 9.0")


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    out, lse = attend(q, k, v, mask, return_lse=True, backend="gluon")
    again, lse_again = attend(q, k, v, mask, return_lse=True, backend="gluon")
    exact, exact_lse = reference.attend(q.double(), k.double(), v.double(), mask)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    blind = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), blind)
    assert not out.transpose(1, 2)[blind].any()
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], atol=1e-3, rtol=1e-5)
    assert (out.double() - exact).norm() <= 5e-3 * exact.norm()


def randoms(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_queries_that_see_nothing() -> None:
    table = torch.rand(2, 4, 8, 8, device="cuda") < 0.3
    table[:, :, 2] = False
    table[0, 1, 7] = False
    table[:, :, 0] = True
    q, k, v = (randoms(2, 900, heads, 128) for heads in (4, 2, 2))
    check(q, k, v, masks.block_sparse(table, 128))
    check(q, k, v, masks.block_sparse(torch.zeros_like(table), 128))


@pytest.mark.parametrize("most", [30.0, 400.0])
def test_maxima_that_move_at_every_tile(most: float) -> None:
    # Keys grow with their place, so that the weights of earlier tiles must be scaled down again and again; or they shrink.
    q, k, v = (randoms(2, 1500, heads, 128) for heads in (4, 2, 2))
    growth = torch.linspace(0.01, most, 1500, device="cuda")
    for factor in (growth, growth.flip(0)):
        keys = (k.float() * factor[:, None, None]).bfloat16()
        for mask in (CAUSAL, FULL):
            check(q, keys, v, mask)


def test_calls_on_two_streams_share_a_mask() -> None:
    mask = masks.window(300)
    inputs = [randoms(1, 8192, heads, 128) for heads in (8, 8, 8)]
    wanted = attend(*inputs, mask, backend="gluon")
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attend(*inputs, mask, backend="gluon"))
    torch.cuda.synchronize()
    assert all(torch.equal(made, wanted) for made in found)
