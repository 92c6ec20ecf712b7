"""What each of four ranks, two nodes of two, computes for test_two_level_experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.parallel.axis import Axis
from hone.parallel.collectives.two_level_experts import visit_experts

EXPERTS, WIDTH, TOKENS = 8, 5, 24


def drawn(rank: int, top_k: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, their experts (of the first `groups` groups of two by score) and weights."""
    random = torch.Generator().manual_seed(rank)
    count = 0 if rank == 3 and top_k == 1 else TOKENS + rank  # a rank without tokens takes part
    x = torch.randn(count, WIDTH, generator=random, dtype=torch.float64)
    scores = torch.rand(count, EXPERTS, generator=random, dtype=torch.float64)
    best = scores.view(count, 2, EXPERTS // 2).amax(2).topk(groups, 1).indices
    allowed = torch.zeros(count, 2, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(EXPERTS // 2, 1)
    weights, ids = scores.masked_fill(~allowed, 0).topk(top_k, 1)
    return x, ids, weights


def experts() -> Tensor:
    """Matrices of all experts, [E, D, D]."""
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def dense(x: Tensor, ids: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """The sum over a token's experts, one matrix for each visit."""
    return (torch.einsum("td,tkfd->tkf", x, matrices[ids]).tanh() * weights[..., None]).sum(1)


def visited(top_k: int, groups: int) -> dict[str, Any]:
    """Largest errors of results and gradients on this rank, and bytes that it sent between nodes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made = {line: dist.new_group(list(line)) for line in ((0, 1), (2, 3), (0, 2), (1, 3))}
    axes = [Axis(line, rank, made[line]) for line in made if rank in line]
    inside, between = axes
    x, ids, weights = drawn(rank, top_k, groups)
    x.requires_grad_()
    weights = weights.requires_grad_()
    whole = experts()
    own = whole[rank * 2 : rank * 2 + 2].clone().requires_grad_()

    def work(rows: Tensor, ends: Tensor) -> Tensor:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([part @ one.T for part, one in zip(rows.split(sizes), own)]).tanh()

    y = visit_experts(inside, between, x, ids, weights, EXPERTS, work)
    before = between.sent["all_to_all"]
    slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (y * slope).sum().backward()
    every = [drawn(one, top_k, groups) for one in range(4)]
    tall = whole.clone().requires_grad_()
    leaves = [(one.requires_grad_(), each, share.requires_grad_()) for one, each, share in every]
    results = [dense(one, each, share, tall) for one, each, share in leaves]
    sum((one * torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one)).sum() for one in results).backward()
    pairs = [
        (y, results[rank]),
        (x.grad, leaves[rank][0].grad),
        (weights.grad, leaves[rank][2].grad),
        (own.grad, tall.grad[rank * 2 : rank * 2 + 2]),
    ]
    errors = [float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs]
    dist.destroy_process_group()
    return {"errors": errors, "between": before}
