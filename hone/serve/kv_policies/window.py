"""KV policy: layers of sliding windows need no more than their window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.base.errors import SpecError
from hone.serve.kv_policies.policy import KeptTokens, KVPolicy, check_heads, windows

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


class Window(KVPolicy):
    """Free the pages outside the model's sliding window: exact, since no token attends to them. Beltagy et al. 2020, arXiv:2004.05150.

    For models whose layers all have a window: a page holds every layer's keys, so one layer without a window keeps all.
    """

    paper: ClassVar[str] = "arXiv:2004.05150"

    def open(self, config: ModelConfig) -> KeptTokens:
        check_heads(self, config)
        each = windows(config)
        if None in each:
            raise SpecError(
                f"engine.kv_policy is window, and layer {each.index(None)} attends to all tokens",
                fix="leave engine.kv_policy out, or use streaming_llm, h2o or snapkv, which change what is computed",
            )
        return KeptTokens(max(one for one in each if one is not None))
