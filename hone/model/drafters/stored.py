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
    from hone.model.drafters import medusa

    check_heads_of(DrafterFacts.of(folder), config)
    kind = heads_kind(folder)
    assert kind == "medusa", f"no reader of {kind}"
    return medusa.load(folder, device, dtype)


def heads_bytes(heads: Any, block_size: int) -> int:
    """Bytes that `heads` of one page of `block_size` tokens keep in a cache of their own."""
    return 0
