"""The compactions of H2O and SnapKV: when a sequence is compacted, and which tokens of each head stay."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from hone.serve.kv_policies.policy import Compaction


class HeavyCompaction(Compaction):
    """Of H2O: a compaction at the prompt's end and after every `interval` tokens."""

    accumulates = True

    def __init__(self, budget: int, heavy: float, interval: int) -> None:
        self._budget, self._heavy, self._interval = budget, heavy, interval

    def boundary(self, num_prompt: int, computed: int) -> int:
        if computed < num_prompt:
            return num_prompt
        interval = self._interval
        return num_prompt + ((computed - num_prompt) // interval + 1) * interval

    def observed(self, num_prompt: int, boundary: int) -> int:
        return 0 if boundary == num_prompt else boundary - self._interval

    def num_kept(self, num_slots: int) -> int:
        return min(num_slots, self._budget)

    def select(self, scores: Tensor, num_kept: int) -> Tensor:
        heavy = min(num_kept - 1, round(num_kept * self._heavy))  # the last token always stays
        split = scores.shape[1] - (num_kept - heavy)
        chosen = scores[:, :split].topk(heavy, dim=1).indices.sort(dim=1).values
        recent = torch.arange(split, scores.shape[1], device=scores.device).expand(len(scores), -1)
        return torch.cat((chosen, recent), dim=1)


class PromptCompaction(Compaction):
    """Of SnapKV: one compaction at the prompt's end."""

    def __init__(self, budget: int, window: int, pooling: int) -> None:
        self._budget, self._window, self._pooling = budget, window, pooling

    def boundary(self, num_prompt: int, computed: int) -> int:
        return num_prompt if computed < num_prompt else sys.maxsize

    def observed(self, num_prompt: int, boundary: int) -> int:
        return max(0, boundary - self._window)

    def num_kept(self, num_slots: int) -> int:
        return min(num_slots, self._budget)

    def select(self, scores: Tensor, num_kept: int) -> Tensor:
        split = scores.shape[1] - self._window
        before = scores[:, :split]
        if self._pooling > 1:
            before = torch.nn.functional.avg_pool1d(before, self._pooling, 1, self._pooling // 2)
        chosen = before.topk(num_kept - self._window, dim=1).indices.sort(dim=1).values
        window = torch.arange(split, scores.shape[1], device=scores.device).expand(len(scores), -1)
        return torch.cat((chosen, window), dim=1)
