"""Grouped-query and multi-query attention from a model with more key/value heads, by pooling them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.compress.conversions.base import Conversion

if TYPE_CHECKING:
    from hone.model.config import LayerSpec, ModelConfig

pooled = lazy("hone.compress.conversions.pooled")

ATTENTION = ("attention", "sliding_window")
"""The mixers whose query heads share key/value heads in groups."""


class GQA(Conversion):
    """Merges key/value heads into fewer, each the mean of the ones it replaces; 1 makes multi-query attention. Ainslie et al. 2023, arXiv:2305.13245.

    The paper heals the result with 5 % of the tokens of the first training. `first` and `random` are its controls.
    """

    paper: ClassVar[str] = "arXiv:2305.13245"

    num_kv_heads: int = Field(gt=0, description="Key/value heads of every attention layer that stay; 1: multi-query.")
    pooling: Literal["mean", "first", "random"] = Field(
        "mean",
        description="A head that stays is the mean of its group, the group's first one, or random numbers of the group's size.",
    )
    seed: int = Field(0, ge=0, description="Seed of the random heads.")

    def convert(self, index: int, layer: LayerSpec, config: ModelConfig) -> LayerSpec | None:
        mixer = layer.mixer
        if mixer.kind not in ATTENTION:
            return None
        given = mixer.num_kv_heads
        if self.num_kv_heads >= given or given % self.num_kv_heads:
            fewer = [str(count) for count in range(1, given) if given % count == 0]
            raise SpecError(
                f"{self.kind}: num_kv_heads {self.num_kv_heads} does not divide the {given} of layer {index} into equal groups",
                fix=f"give {' or '.join(fewer)}" if fewer else "nothing: it is multi-query attention already",
            )
        return layer.model_copy(update={"mixer": mixer.model_copy(update={"num_kv_heads": self.num_kv_heads})})

    def recipe(self, index: int, made: Any, source: ModelConfig, config: ModelConfig) -> Any:
        before = source.layers[index].mixer
        if before.kind not in ATTENTION:
            return None
        return pooled.recipe(made, before, self.num_kv_heads, self.pooling, f"{self.seed}/gqa/{made.name}")
