"""KV policy: everything stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.serve.kv_policies.policy import KeptTokens, KVPolicy

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


class Full(KVPolicy):
    """Keep the keys and values of every token."""

    def open(self, config: ModelConfig) -> KeptTokens:
        return KeptTokens()
