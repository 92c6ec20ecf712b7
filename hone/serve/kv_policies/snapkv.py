"""KV policy: a prompt's keys that its last tokens attend to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from hone.base.lazy import lazy
from hone.serve.kv_policies.policy import Compaction, Kept, KVPolicy, check_global, check_heads

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig

torch = lazy("torch")


class SnapKV(KVPolicy):
    """Keep of a prompt, in each head, what its last `window` tokens attend to most, and these; all of the output. Li et al. 2024, arXiv:2404.14469.

    Scores are the softmax probabilities of the window's queries, summed over them and over the query heads that share a
    key head, and averaged over `pooling` neighbouring tokens.
    """

    paper: ClassVar[str] = "arXiv:2404.14469"
    moves: ClassVar[bool] = True

    budget: int = Field(1024, ge=2, description="Tokens of a prompt that stay in each key head, the window included.")
    window: int = Field(32, ge=1, description="Last tokens of the prompt, whose attention decides.")
    pooling: int = Field(5, ge=1, description="Neighbouring tokens over which scores are averaged; odd, 1 for none.")

    @model_validator(mode="after")
    def _fits(self) -> SnapKV:
        if self.window >= self.budget:
            raise ValueError(f"a window of {self.window} tokens leaves none of a budget of {self.budget} to choose")
        if self.pooling % 2 == 0:
            raise ValueError(f"pooling over {self.pooling} tokens has no middle one")
        return self

    def open(self, config: ModelConfig) -> Kept:
        check_heads(self, config)
        check_global(self, config)
        return Kept(compaction=PromptCompaction(self))


class PromptCompaction(Compaction):
    """One compaction at the prompt's end."""

    def __init__(self, policy: SnapKV) -> None:
        self._policy = policy

    def boundary(self, num_prompt: int, computed: int) -> int:
        return num_prompt if computed < num_prompt else sys.maxsize

    def observed(self, num_prompt: int, boundary: int) -> int:
        return max(0, boundary - self._policy.window)

    def num_kept(self, num_slots: int) -> int:
        return min(num_slots, self._policy.budget)

    def most_slots(self, num_prompt: int, length: int) -> int:
        return min(num_prompt, self._policy.budget) + length - num_prompt

    def select(self, scores: Tensor, num_kept: int) -> Tensor:
        policy = self._policy
        split = scores.shape[1] - policy.window
        before = scores[:, :split]
        if policy.pooling > 1:
            before = torch.nn.functional.avg_pool1d(before, policy.pooling, 1, policy.pooling // 2)
        chosen = before.topk(num_kept - policy.window, dim=1).indices.sort(dim=1).values
        window = torch.arange(split, scores.shape[1], device=scores.device).expand(len(scores), -1)
        return torch.cat((chosen, window), dim=1)
