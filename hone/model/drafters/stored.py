"""Draft heads read from their folder, for the model that they guess for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hone.model.config import ModelConfig
from hone.model.drafters.folder import DrafterFacts, check_heads_of
from hone.model.folder import heads_kind


def load_heads(folder: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Any:
    """The heads in `folder`, in `dtype` on `device`, with their `kind`, for a model of `config`.

    Raises ArtifactError for a corrupt file, SpecError for heads of another model.
    """
    from hone.model.drafters import eagle3, medusa

    check_heads_of(DrafterFacts.of(folder), config)
    kind = heads_kind(folder)
    if kind == "eagle3":
        return eagle3.load(folder, config.num_layers, device, dtype)
    assert kind == "medusa", f"no reader of {kind}"
    return medusa.load(folder, device, dtype)


def heads_bytes(heads: Any, block_size: int) -> int:
    """Bytes that `heads` keep of a page of `block_size` tokens in a cache of their own, in their dtype."""
    if heads.kind != "eagle3":
        return 0
    mixer, weight = heads.config.layer.mixer, heads.fc.weight
    return 2 * mixer.num_kv_heads * mixer.head_dim * block_size * int(weight.element_size())
