"""The Hopper attention backward on a GPU: more tiles than multiprocessors, tiles nobody sees, every launch form, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hone.ops.attention import masks, reference
from hone.ops.attention.masks import CAUSAL, FULL, Mask, block_sparse, documents, window
from hone.ops.dispatch import locate

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    """Gluon kernels need compute capability 9.0."""
    if not locate("cuda").runs_gluon:
        pytest.skip("Gluon kernels need compute capability 9.0")


def far_from(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def check(shape: tuple[int, int, int, int, int], head_dim: int, mask: Mask, **changes) -> None:
    """dq, dk, dv of one case with `changes` to its configuration, twice, on poisoned memory."""
    from hone.ops.attention.gluon_backward import config, launch, tile_shape

    batch, seq_q, seq_k, heads, kv_heads = shape
    shapes = ((seq_q, heads), (seq_k, kv_heads), (seq_k, kv_heads), (seq_q, heads))
    q, k, v, d_out = (torch.randn(batch, *part, head_dim, device="cuda").bfloat16() for part in shapes)
    d_lse = torch.randn(batch, heads, seq_q, device="cuda")
    exact = [part.double().requires_grad_() for part in (q, k, v)]
    out, lse = reference.attend(*exact, mask)
    seen = torch.isfinite(lse)
    total = (out * d_out.double()).sum() + torch.where(seen, lse * d_lse, 0.0).sum()
    true = torch.autograd.grad(total, exact)
    block_m, block_n = tile_shape(head_dim, head_dim, mask.block)
    tiles = mask.tiles(seq_q, seq_k, block_m, block_n, q.device, transposed=True)
    plan = dataclasses.replace(config(head_dim), **changes)
    kept = (out.detach().bfloat16(), lse.detach().float(), d_out, d_lse)
    runs = []
    for _ in range(2):
        poison = [torch.full_like(part, float("nan")) for part in (q, k, v, q.float())]
        del poison
        runs.append(launch(q, k, v, *kept, tiles, head_dim**-0.5, None, plan))
    for name, found, again, wanted in zip(("dq", "dk", "dv"), *runs, true, strict=True):
        assert far_from(found, wanted) < 8e-3, (name, far_from(found, wanted))
        # dk and dv are one program's sums; dq's parts are added in no fixed order.
        assert torch.equal(found, again) if name != "dq" else far_from(found, again) < 1e-3, name


def random_table(heads: int, num_q: int, num_k: int) -> Tensor:
    """Blocks at random, a column that every query sees, one that none sees, and a row that sees nothing."""
    table = torch.rand(heads, num_q, num_k, device="cuda") < 0.2
    table[..., 0] = True
    table[..., num_k // 2] = False
    table[:, num_q // 2] = False
    return table


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dynamic", [True, False])
def test_more_tiles_than_multiprocessors(head_dim: int, dynamic: bool) -> None:
    # Keys before the window of the first query are seen by nobody.
    check((4, 700, 2500, 16, 8), head_dim, window(200), dynamic=dynamic)
    check((2, 2100, 2100, 8, 8), head_dim, block_sparse(random_table(8, 17, 17), 128), dynamic=dynamic)
    check((3, 1300, 1300, 16, 8), head_dim, CAUSAL, dynamic=dynamic)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rules_with_data(head_dim: int) -> None:
    ids = torch.randint(0, 9, (3, 1500), device="cuda").sort(-1).values
    check((3, 1500, 1500, 12, 4), head_dim, documents(ids))
    check((3, 1500, 1500, 4, 4), head_dim, documents(ids, causal=False))
    check((3, 1500, 1500, 4, 4), head_dim, masks.longformer(torch.rand(3, 1500, device="cuda") < 0.01, 90, 90))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sixteen_query_heads_a_key_head(head_dim: int) -> None:
    check((2, 333, 1111, 16, 1), head_dim, CAUSAL)
    check((2, 1111, 333, 16, 1), head_dim, FULL)
    check((2, 1000, 1000, 32, 2), head_dim, block_sparse(random_table(32, 8, 8), 128))
