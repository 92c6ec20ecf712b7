"""KV policy: the tokens that received most attention so far, and the most recent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.serve.kv_policies.policy import Compaction, Kept, KVPolicy, check_global, check_heads

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig

torch = lazy("torch")


class H2O(KVPolicy):
    """Keep in each head the heavy hitters, which received most attention so far, and the most recent tokens. Zhang et al. 2023, arXiv:2306.14048.

    The paper evicts a token at every step. Here a sequence is compacted at its prompt's end and after every `interval`
    tokens of output, so it has `budget` to `budget + interval` tokens; scores are summed over all queries so far, those of
    the output as well. They are computed by a second pass over the tokens since the last compaction, which doubles the work
    of a prompt and leaves the attention kernels as they are.
    """

    paper: ClassVar[str] = "arXiv:2306.14048"
    moves: ClassVar[bool] = True

    budget: int = Field(1024, ge=2, description="Tokens that stay in each key head after a compaction.")
    heavy: float = Field(
        0.5, ge=0, le=1, description="Part of the budget for heavy hitters; the rest is the most recent."
    )
    interval: int = Field(32, ge=1, description="Tokens of output between two compactions.")

    def open(self, config: ModelConfig) -> Kept:
        check_heads(self, config)
        check_global(self, config)
        return Kept(compaction=HeavyCompaction(self))


class HeavyCompaction(Compaction):
    """A compaction at the prompt's end and after every `interval` tokens."""

    accumulates = True

    def __init__(self, policy: H2O) -> None:
        self._policy = policy

    def boundary(self, num_prompt: int, computed: int) -> int:
        if computed < num_prompt:
            return num_prompt
        interval = self._policy.interval
        return num_prompt + ((computed - num_prompt) // interval + 1) * interval

    def observed(self, num_prompt: int, boundary: int) -> int:
        return 0 if boundary == num_prompt else boundary - self._policy.interval

    def num_kept(self, num_slots: int) -> int:
        return min(num_slots, self._policy.budget)

    def most_slots(self, num_prompt: int, length: int) -> int:
        return min(length, self._policy.budget + self._policy.interval)

    def select(self, scores: Tensor, num_kept: int) -> Tensor:
        heavy = min(num_kept - 1, round(num_kept * self._policy.heavy))  # the last token always stays
        split = scores.shape[1] - (num_kept - heavy)
        chosen = scores[:, :split].topk(heavy, dim=1).indices.sort(dim=1).values
        recent = torch.arange(split, scores.shape[1], device=scores.device).expand(len(scores), -1)
        return torch.cat((chosen, recent), dim=1)
