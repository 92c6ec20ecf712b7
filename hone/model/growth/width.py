"""More width: hidden channels, heads and feed-forward channels, equally many in every layer. The base of its techniques."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.model.config import LayerSpec, ModelConfig
from hone.model.families import FAMILIES
from hone.model.growth.axis import NEW, Axis, Integers
from hone.model.growth.base import Growth
from hone.model.growth.layout import Layout

if TYPE_CHECKING:
    from hone.model.growth.checkpoint import Recipe

tensors = lazy("hone.model.growth.tensors")

_SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")


class Width(Growth):
    """Base of the techniques that widen. A size that is left out stays, but for num_kv_heads, which follows num_heads."""

    copies: ClassVar[bool] = True
    """Whether a further entry is a copy of one that was there; otherwise it is new, and nothing reads it yet."""
    from_next: ClassVar[bool] = False
    """Whether the rows of a copy are those of the next layer."""

    hidden_size: int | None = Field(None, gt=0, description="Channels of the larger model's residual stream.")
    intermediate_size: int | None = Field(
        None, gt=0, description="Feed-forward channels of every layer; of experts those of each."
    )
    num_heads: int | None = Field(
        None,
        gt=0,
        description="Query heads of every layer. Their width, head_dim, stays: rotary positions depend on it.",
    )
    num_kv_heads: int | None = Field(
        None, gt=0, description="Key/value heads; when empty as many query heads share one as before."
    )

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on copies, relative to the weights' own."""
        return 0.0

    @property
    def uneven(self) -> bool:
        """Whether copies of one entry have unequal shares."""
        return False

    def in_turn(self, size: int, grown: int) -> Integers:
        """The source of each of `grown` entries, of the `size` before: themselves, then the first, the second, ... again, or none."""
        places = np.arange(grown)
        return places % size if self.copies else np.where(places < size, places, NEW)

    def sources(self, size: int, grown: int, draw: np.random.Generator) -> Integers:
        """As `in_turn`, for axes of which any entry may be copied: not key heads, each of which serves as many query heads."""
        return self.in_turn(size, grown)

    def axis(self, size: int, grown: int, key: str, seed: int) -> Axis:
        """The axis that `key` names: always the same for the same `seed`."""
        if size == grown:
            return Axis.of(size, np.arange(size))
        return self.shared(size, self.sources(size, grown, generator(seed, key)), key, seed)

    def shared(self, size: int, sources: Integers, key: str, seed: int) -> Axis:
        """The axis of these `sources` with the shares of this technique."""
        return Axis.of(size, sources, generator(seed, f"{key}.shares") if self.uneven else None)

    def grow(self, config: ModelConfig) -> ModelConfig:
        if all(getattr(self, name) is None for name in _SIZES):
            raise SpecError(f"{self.kind} names nothing to widen", fix=f"set one of {', '.join(_SIZES)}")
        for name in _SIZES[1:]:
            block = "feed_forward" if name == "intermediate_size" else "mixer"
            if getattr(self, name) and not any(hasattr(getattr(layer, block), name) for layer in config.layers):
                kind = getattr(config.layers[0], block).kind
                raise SpecError(f"{self.kind}: no layer has {name}, '{kind}' neither", fix=f"leave {name} out")
        # Written and read: their sizes must fit together.
        layers = [self._layer(index, layer, config.layers[0]) for index, layer in enumerate(config.layers)]
        values: dict[str, Any] = {
            "layers": [one.model_dump(mode="json") for one in layers],
            "hidden_size": self._more("hidden_size", config.hidden_size),
        }
        if FAMILIES[config.family].embedding_sqrt:
            values["embedding_multiplier"] = values["hidden_size"] ** 0.5
        large = ModelConfig.read({**config.model_dump(mode="json"), **values})
        if large == config:
            raise SpecError(f"{self.kind}: the sizes are those that the smaller model has", fix="give larger ones")
        self._divides(config, large)
        Layout(config, large, self, 0).check()
        return large

    def _divides(self, config: ModelConfig, large: ModelConfig) -> None:
        """Raises SpecError where transformers would refuse the larger config.json, as it does for Llama, Gemma and Mistral."""
        for before, after in zip(config.layers, large.layers, strict=True):
            heads = getattr(before.mixer, "num_heads", 1), getattr(after.mixer, "num_heads", 1)
            if config.hidden_size % heads[0] == 0 and large.hidden_size % heads[1]:
                raise SpecError(
                    f"{self.kind}: hidden_size {large.hidden_size} is no multiple of num_heads {heads[1]}, which transformers wants of most families",
                    fix=f"give a hidden_size that is a multiple of {heads[1]}, or another num_heads",
                )

    def _more(self, name: str, now: int) -> int:
        """The size `name`, which is `now`. Raises SpecError when it would shrink."""
        wanted = getattr(self, name)
        if wanted is not None and wanted < now:
            raise SpecError(
                f"{self.kind}: {name} {wanted} is less than the {now} of the smaller model", fix=f"give {now} or more"
            )
        return wanted or now

    def _layer(self, index: int, layer: LayerSpec, first: LayerSpec) -> LayerSpec:
        """The wider layer. Raises SpecError where its parts have no such size, or another one than the first layer's."""
        update = {}
        for block, names in {"mixer": ("num_heads", "num_kv_heads"), "feed_forward": ("intermediate_size",)}.items():
            part = getattr(layer, block)
            sizes = {
                name: self._size(index, part, getattr(first, block), name) for name in names if hasattr(part, name)
            }
            if "num_kv_heads" in sizes and self.num_kv_heads is None and self.num_heads is not None:
                sizes["num_kv_heads"] = self._follow(index, part)
            update[block] = part.model_copy(update=sizes)
        return layer.model_copy(update=update)

    def _size(self, index: int, part: Any, first: Any, name: str) -> int:
        now, wanted = getattr(part, name), getattr(self, name)
        if wanted is None:
            return now
        if getattr(first, name, now) != now:
            raise SpecError(
                f"{self.kind}: layers.{index} has another {name} ({now}) than layer 0 ({getattr(first, name)})",
                fix=f"leave {name} out",
            )
        grown = self._more(name, now)
        if grown > now and name not in part.splits:
            raise SpecError(
                f"{self.kind}: {name} of '{part.kind}' in layers.{index} cannot grow: its heads are not alike, or what it computes "
                "depends on their number",
                fix=f"leave {name} out, and grow hidden_size, intermediate_size or the number of layers",
            )
        return grown

    def _follow(self, index: int, mixer: Any) -> int:
        """Key heads with as many query heads each as before."""
        many, rest = divmod(mixer.num_kv_heads * (self.num_heads or 0), mixer.num_heads)
        if rest:
            each = mixer.num_heads // mixer.num_kv_heads
            raise SpecError(
                f"{self.kind}: num_heads {self.num_heads} is no multiple of the {each} query heads that share a key head in layers.{index}",
                fix=f"give a multiple of {each}, or num_kv_heads, too",
            )
        return many

    def recipes(self, config: ModelConfig, seed: int) -> Mapping[str, Recipe]:
        return tensors.wider(config, self.grow(config), self, seed)


def generator(seed: int, key: str) -> np.random.Generator:
    """Random numbers that depend on `seed` and `key` alone."""
    digest = hashlib.sha256(f"{seed}/growth/{key}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
