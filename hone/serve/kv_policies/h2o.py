"""KV policy: the tokens that received most attention so far, and the most recent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.serve.kv_policies.policy import KeptTokens, KVPolicy, check_global, check_heads

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


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

    def open(self, config: ModelConfig) -> KeptTokens:
        from hone.serve.kv_policies.compactions import HeavyCompaction

        check_heads(self, config)
        check_global(self, config)
        return KeptTokens(compaction=HeavyCompaction(self.budget, self.heavy, self.interval))
