"""The kernels on a GPU in the blocks of a ring and of gathered keys: one process computes what every rank would."""

from __future__ import annotations

import pytest
import torch

from hone.ops import attend, attend_backward, merge
from hone.parallel.context.layout import Block, Layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def parts(layout: Layout, window: int | None, gathered: bool) -> list[tuple[Block, torch.Tensor]]:
    """The blocks of one rank, each with the places of its keys."""
    if gathered:
        line = torch.arange(layout.seq_len, device=layout.device)
        return [(block, line[block.keys]) for block in layout.gathered(window)]
    order = [(layout.rank - step) % layout.num_ranks for step in range(layout.num_ranks)]
    blocks = [(layout.block(source, window), layout.places_of(source)) for source in order]
    return [(block, places[block.keys]) for block, places in blocks if block is not None]


@pytest.mark.parametrize("gathered", [False, True], ids=["ring", "gathered"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_the_blocks_of_all_ranks_are_the_whole(gathered, packed, window, head_dim):
    torch.manual_seed(0)
    length, num_ranks, wide = 2048, 4, {"dtype": torch.bfloat16, "device": "cuda"}
    q, d_out = (torch.randn(2, length, 8, head_dim, **wide) for _ in range(2))
    k, v = (torch.randn(2, length, 2, head_dim, **wide) for _ in range(2))
    ids = torch.randint(0, 200, (2, length), device="cuda").eq(0).cumsum(1) if packed else None
    layouts = [Layout(length, num_ranks, rank, document_ids=ids, device="cuda") for rank in range(num_ranks)]
    leaves = [part.float().requires_grad_() for part in (q, k, v)]
    out = attend(*leaves, layouts[0].whole(window), backend="reference")
    wanted = [out, *torch.autograd.grad(out, leaves, d_out.float())]
    found = [torch.zeros_like(part) for part in wanted]
    for layout in layouts:
        mine = layout.places
        some_q, some_d = q[:, mine], d_out[:, mine]
        total = torch.zeros(some_q.shape, device="cuda"), torch.full((2, 8, len(mine)), -torch.inf, device="cuda")
        blocks = parts(layout, window, gathered)
        for (queries, _, mask), places in blocks:
            part = attend(some_q[:, queries], k[:, places], v[:, places], mask, return_lse=True)
            known = total[0][:, queries], total[1][..., queries]
            total[0][:, queries], total[1][..., queries] = merge([known, part])
        found[0][:, mine] = total[0]
        rounded, lse = total[0].bfloat16(), total[1]
        for (queries, _, mask), places in blocks:
            ours = some_q[:, queries], k[:, places], v[:, places], rounded[:, queries], lse[..., queries]
            d_q, d_k, d_v = attend_backward(*ours, some_d[:, queries], mask)
            found[1][:, mine[queries]] += d_q
            found[2][:, places] += d_k
            found[3][:, places] += d_v
    for name, ours, true in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (ours - true).norm() / true.norm()
        assert error < 0.01, f"{name}: {error}"
