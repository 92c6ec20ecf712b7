"""A checkpoint whose tensors are made of another one's when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hone.model.config import ModelConfig
from hone.model.hf import Checkpoint, config_values


class Recipe(Protocol):
    """How one tensor is made."""

    @property
    def name(self) -> str:
        """The tensor of the source that it is made of, in whose file mistakes are looked for."""
        ...

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        """Its shape, without reading a tensor."""
        ...

    def make(self, source: Checkpoint) -> Tensor:
        """The tensor, on the CPU."""
        ...


class GrownCheckpoint(Checkpoint):
    """The model of `config`, of whose tensors `recipes` say how they are made of those of `source`, which may be grown itself."""

    def __init__(self, source: Checkpoint, config: ModelConfig, recipes: Mapping[str, Recipe]) -> None:
        self.folder = source.folder
        self.config = config
        self.values = config_values(config, source.dtype)
        self.quantization = None
        self.source, self.recipes = source, recipes

    def reopened(self) -> GrownCheckpoint:
        opened = copy(self)
        opened.source = self.source.reopened()
        return opened

    def names(self) -> list[str]:
        return list(self.recipes)

    def tensor(self, name: str) -> Tensor:
        return self.recipes[name].make(self.source)

    def file(self, name: str) -> Path:
        return self.source.file(self.recipes[name].name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.recipes[name].shape(self.source)

    def close(self) -> None:
        self.source.close()
