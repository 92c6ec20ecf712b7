"""The choice of the best experts in the best groups: DeepSeek's node-limited routing, shared by the softmax and sigmoid routers."""

from __future__ import annotations

import torch
from torch import Tensor


def best(scores: Tensor, top_k: int, num_groups: int, top_groups: int, best_of_group: int) -> Tensor:
    """The `top_k` largest of `scores` [T, E] a token: ids int64 [T, k].

    With `num_groups` G > 1, of the experts in the `top_groups` groups of E / G neighbours whose `best_of_group` largest scores
    have the largest sum: a token then visits no more devices than that.
    """
    if num_groups > 1:
        grouped = scores.unflatten(-1, (num_groups, -1))
        strength = grouped.topk(best_of_group, -1).values.sum(-1)
        chosen = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, strength.topk(top_groups, -1).indices, True)
        scores = grouped.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)
    return scores.topk(top_k, -1).indices


def check_groups(num_experts: int, top_k: int, num_groups: int, top_groups: int, best_of_group: int) -> None:
    """Raises ValueError when the groups do not divide the experts, or hold too few of them."""
    if num_experts % num_groups:
        raise ValueError(f"num_groups {num_groups} does not divide {num_experts} experts")
    each = num_experts // num_groups
    if top_groups > num_groups:
        raise ValueError(f"top_groups {top_groups} is more than num_groups {num_groups}")
    if num_groups > 1 and each < best_of_group:
        raise ValueError(f"groups of {each} experts are too small: they are chosen by their {best_of_group} best")
    if num_groups > 1 and top_groups * each < top_k:
        raise ValueError(f"{top_groups} groups of {each} experts are too few for top_k {top_k}")
