"""KV policy: the first tokens, on which attention rests, and the most recent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.serve.kv_policies.policy import KeptTokens, KVPolicy, check_heads

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


class StreamingLLM(KVPolicy):
    """Attend to the first `sink_tokens` and the last `window` tokens only, and free the pages between. Xiao et al. 2023, arXiv:2309.17453.

    Every token attends so, those of the prompt too: what is computed does not depend on chunks, and pages can be shared.
    Sinks stay at their own positions. In the paper positions count within the cache, so that distances never exceed those
    of training; the engine ends sequences at `max_model_len` anyway (docs/serving.md has both figures).
    """

    paper: ClassVar[str] = "arXiv:2309.17453"

    sink_tokens: int = Field(
        4, ge=0, description="First tokens that stay; pages are freed whole, so at least one page."
    )
    window: int = Field(1024, ge=2, description="Last tokens that a token attends to, itself included.")

    def open(self, config: ModelConfig) -> KeptTokens:
        check_heads(self, config)
        return KeptTokens(self.window, self.sink_tokens, masks=True)
