"""A checkpoint whose tensors are made of another one's when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hone.model.config import ModelConfig
from hone.model.hf import config_values
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource


class Recipe(Protocol):
    """How one tensor is made."""

    @property
    def name(self) -> str:
        """The tensor of the source that it is made of, in whose file mistakes are looked for."""
        ...

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        """Its shape, without reading a tensor."""
        ...

    def make(self, source: WeightSource) -> Tensor:
        """The tensor, on the CPU."""
        ...


class GrownWeights(View):
    """Tensors of which `recipes` say how they are made of those of `source`, which may be grown itself."""

    def __init__(self, source: WeightSource, recipes: Mapping[str, Recipe]) -> None:
        super().__init__(source)
        self.recipes = recipes

    def names(self) -> list[str]:
        return list(self.recipes)

    def tensor(self, name: str) -> Tensor:
        return self.recipes[name].make(self.source)

    def file(self, name: str) -> Path:
        return self.source.file(self.recipes[name].name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.recipes[name].shape(self.source)


def grown(source: ModelSource, config: ModelConfig, recipes: Mapping[str, Recipe]) -> ModelSource:
    """The model of `config`, whose tensors `recipes` make of those of `source`."""
    return ModelSource(source.folder, config, config_values(config, source.dtype), GrownWeights(source, recipes))
