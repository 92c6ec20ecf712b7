"""Depth stacking: the layers of the smaller model, in order, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.model.config import ModelConfig
from hone.model.growth.base import Growth, must_grow
from hone.model.growth.depth import deeper

if TYPE_CHECKING:
    from hone.model.growth.checkpoint import Recipe


class Stack(Growth):
    """Stacks copies of the trained layers; not exact: the loss jumps, and falls fast. Du et al. 2024 (G_stack), arXiv:2405.15319.

    Gong et al. 2019 (StackBERT) doubled BERT so. `order: interleave` puts copies side by side: 0, 0, 1, 1, ...
    """

    paper: ClassVar[str] = "arXiv:2405.15319"

    num_layers: int | None = Field(None, gt=0, description="Layers of the larger model; twice as many when empty.")
    order: Literal["stack", "interleave"] = Field(
        "stack", description="Where copies stand: all layers once more after the last one, or each behind its original."
    )

    @property
    def exact(self) -> bool:
        return False

    def _order(self, config: ModelConfig) -> tuple[int, ...]:
        """The layer of the smaller model at each place."""
        few = config.num_layers
        many = 2 * few if self.num_layers is None else self.num_layers
        must_grow("stack: num_layers", few, many)
        return tuple(place % few if self.order == "stack" else place * few // many for place in range(many))

    def grow(self, config: ModelConfig) -> ModelConfig:
        layers = [config.layers[index] for index in self._order(config)]
        # Validated again: a layer that reuses the keys of an earlier one may stand at another place.
        return ModelConfig.read({**config.model_dump(mode="json"), "layers": layers})

    def recipes(self, config: ModelConfig, seed: int) -> Mapping[str, Recipe]:
        return deeper(config, self.grow(config), self._order(config))
