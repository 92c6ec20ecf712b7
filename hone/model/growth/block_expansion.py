"""Block expansion: copies of layers between the trained ones, which add zero to the residual stream at first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.growth.base import Growth, must_grow, silencing
from hone.model.growth.depth import deeper

if TYPE_CHECKING:
    from hone.model.growth.checkpoint import Recipe


class BlockExpansion(Growth):
    """Inserts copies whose output projections are zero: the same logits. Wu et al. 2024 (LLaMA Pro), arXiv:2401.02415.

    Copies are spread evenly, each behind its original. Where a block's output is normed, that norm's weight is what is zero. All
    layers are trained; the paper, which goes on with a trained model on new text, trains the copies alone.
    """

    paper: ClassVar[str] = "arXiv:2401.02415"

    num_layers: int | None = Field(
        None, gt=0, description="Layers of the larger model; when empty one more for every four, as in the paper."
    )

    @property
    def exact(self) -> bool:
        return True

    def _order(self, config: ModelConfig) -> tuple[tuple[int, ...], frozenset[int]]:
        """The layer of the smaller model at each place, and the places of the copies."""
        few = config.num_layers
        many = few + max(1, few // 4) if self.num_layers is None else self.num_layers
        must_grow("block_expansion: num_layers", few, many)
        added = many - few
        behind = [-(-(number + 1) * few // added) - 1 for number in range(added)]
        order: list[int] = []
        silent: set[int] = set()
        for index in range(few):
            order.append(index)
            for _ in range(behind.count(index)):
                silent.add(len(order))
                order.append(index)
        return tuple(order), frozenset(silent)

    def grow(self, config: ModelConfig) -> ModelConfig:
        order, silent = self._order(config)
        layers = [config.layers[index] for index in order]
        large = ModelConfig.read({**config.model_dump(mode="json"), "layers": layers})
        for place in silent:
            silencing(large, place)
        places = [place for place in range(len(order)) if place not in silent]
        for index, place in enumerate(places):
            mixer, source = config.layers[index].mixer, config.kv_source(index)
            if place != index and mixer.by_layer:
                raise SpecError(
                    f"block_expansion: layer {index} becomes layer {place}, and '{mixer.kind}' draws random numbers from its place",
                    fix="use kind: stack, which is not exact, or grow the width alone",
                )
            if source is not None and large.kv_source(place) != places[source]:
                raise SpecError(
                    f"block_expansion: layer {index} reuses the keys of layer {source}, between which and it a copy would stand",
                    fix="use kind: stack, or a num_layers whose copies stand elsewhere",
                )
        return large

    def recipes(self, config: ModelConfig, seed: int) -> Mapping[str, Recipe]:
        return deeper(config, self.grow(config), *self._order(config))
