"""KV policy: a prompt's keys that its last tokens attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from hone.serve.kv_policies.policy import KeptTokens, KVPolicy, check_global, check_heads

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


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

    def open(self, config: ModelConfig) -> KeptTokens:
        from hone.serve.kv_policies.compactions import PromptCompaction

        check_heads(self, config)
        check_global(self, config)
        return KeptTokens(compaction=PromptCompaction(self.budget, self.window, self.pooling))
