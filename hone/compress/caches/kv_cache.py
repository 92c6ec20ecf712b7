"""Scales of the KV cache: keys and values that a cache of 8 bits can hold, for engines that serve from one.

Shapes: T tokens of a batch without padding, KV key/value heads of Dh channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.table import Choice
from hone.compress.observers import OBSERVERS
from hone.compress.observers.base import Observer
from hone.compress.observers.min_max import MinMax
from hone.compress.quantizers.base import RANGE_BYTES
from hone.compress.step import CacheStep, Entries, Ranges

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hone.model.config import ModelConfig
    from hone.model.quantized.scheme import CacheScheme


class KVCache(CacheStep):
    """Scales of keys (after the rotation) and values for a KV cache of fp8 or int8; checks compute with it. Formats: compressed-tensors' kv_cache_scheme, OCP FP8 (arXiv:2209.05433)."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset({"cache:quantized"})

    number: Literal["fp8", "int8"] = Field("fp8", description="Number format of the cache: e4m3, or 8-bit integers.")
    per: Literal["tensor", "head"] = Field(
        "tensor", description="What shares a scale: all keys (all values) of a layer, or those of one KV head."
    )
    observer: Annotated[Observer, Choice(OBSERVERS)] = Field(
        MinMax(kind="min_max"), description="Range of the keys and values that the scales represent."
    )

    @model_validator(mode="after")
    def _observes_the_cache(self) -> KVCache:
        if "gradients" in self.observer.needs:
            raise ValueError(f"observer {self.observer.kind} reads gradients of the linears' inputs alone: use mse")
        return self

    @property
    def cache_scheme(self) -> CacheScheme:
        from hone.model.quantized.scheme import CacheScheme

        return CacheScheme("int" if self.number == "int8" else "e4m3", self.per)

    @property
    def note(self) -> str:
        if self.number == "fp8":
            return ""
        return "vLLM reads scales of fp8 caches alone; hone and transformers with compressed-tensors compute with int8 ones"

    def check_cache(self, config: ModelConfig, method: str, *, calibrated: bool) -> None:
        """Raises SpecError where the model's cache has no keys and values, or what is written cannot hold their scales."""
        if not calibrated:
            raise SpecError(
                f"{self.kind} needs calibration inputs", fix="add data: NAME OR FOLDER, or set calibration_text=FILE"
            )
        from hone.model.mixers.attention import Attention

        for index, layer in enumerate(config.layers):
            if not isinstance(layer.mixer, Attention):
                raise SpecError(
                    f"{self.kind}: layer {index} is {layer.mixer.kind}: scales are for the keys and values of attention",
                    fix="leave the step out",
                )
        if method != "compressed-tensors":
            raise SpecError(
                f"{self.kind}: scales of a KV cache are stored in the format compressed-tensors, the weights in {method}",
                fix="take a layout of compressed-tensors, which the quantizers have by default, or leave the step out",
            )

    def cache_entries(self, config: ModelConfig, dtype: Any) -> Entries:
        from hone.model.quantized import kv_cache as rounding

        found = {}
        for index, layer in enumerate(config.layers):
            shape = rounding.scale_shape(self.cache_scheme, layer.mixer.num_kv_heads)
            found.update(dict.fromkeys(rounding.scale_names(config, index).values(), (dtype, shape)))
        return found

    def range_bytes(self, config: ModelConfig) -> float:
        """Of the statistics of keys and values."""
        widest = max((2 * one.mixer.num_kv_heads * one.mixer.head_dim for one in config.layers), default=0)
        return widest * sum(RANGE_BYTES[name] for name in self.observer.needs)

    @property
    def cache_statistics(self) -> frozenset[str]:
        return self.observer.needs

    def scales(
        self, ranges: Ranges, config: ModelConfig, index: int, stored: torch.dtype, computed: torch.dtype
    ) -> dict[str, Tensor]:
        """The scales of keys and values by name. Raises ArtifactError for keys or values that are not finite."""
        import torch

        from hone.model.quantized import kv_cache as rounding

        found = {}
        for name, parts in zip(rounding.scale_names(config, index).values(), ranges, strict=True):
            scales = [self._scale(one, index, computed) for one in parts]
            found[name] = torch.stack(scales).view(rounding.scale_shape(self.cache_scheme, len(scales))).to(stored)
        return found

    def use(self, layer: nn.Module, config: ModelConfig, index: int, stored: dict[str, Tensor]) -> None:
        """Lets `layer` round its keys and values with the scales in `stored`, by checkpoint name."""
        from hone.model.quantized import kv_cache as rounding

        rounding.add_rounding(layer, self.cache_scheme)
        device = next(layer.parameters()).device
        for name, tensor in rounding.scale_names(config, index).items():
            setattr(layer.mixer.kv_rounding, name, stored[tensor].to(device))

    def _scale(self, statistics: dict[str, Tensor], index: int, dtype: Any) -> Tensor:
        """The scale, float32 [], of the values that `statistics` are of."""
        from hone.compress.calibration import not_finite
        from hone.ops.rounding.inputs import static_tensors

        ends = self.observer.range(statistics, self.cache_scheme.rounding)
        scale = static_tensors(self.cache_scheme.rounding, *ends)["input_scale"][0]
        extremes = statistics.get("extremes")
        if not bool(scale.isfinite()) or (extremes is not None and not bool(extremes.isfinite().all())):
            raise not_finite(f"the keys or values of layer {index}", dtype)
        return scale
