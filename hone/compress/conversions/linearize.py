"""Linear attention in place of softmax attention in some layers: a hybrid whose other layers keep their caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.compress.conversions.base import Conversion, must_be_plain
from hone.compress.conversions.gqa import ATTENTION
from hone.model.mixers import MIXERS

if TYPE_CHECKING:
    from hone.model.config import LayerSpec, ModelConfig

projected = lazy("hone.compress.conversions.projected")


class Linearize(Conversion):
    """Replaces softmax attention in some layers by a recurrent mixer that begins with its projections. Wang et al. 2024, arXiv:2408.15237.

    Queries, keys, values and the output projection are the attention's, keys and values once for each query head; gates and decays
    are new. Such a layer keeps a state of constant size in place of keys and values. It computes something else: heal the
    result by distillation from the given model.
    """

    paper: ClassVar[str] = "arXiv:2408.15237"
    wanted: ClassVar[str] = "softmax attention in a second layer, or name layers"

    layers: tuple[int, ...] = Field(
        (), description="The layers that change, from 0; empty: every second one, so that the first stays."
    )
    mixer: Literal["gated_linear", "linear_attention", "retnet", "delta_net"] = Field(
        "gated_linear",
        description="What they become. linear_attention has no new weights and no positions; retnet keeps rotary positions.",
    )
    seed: int = Field(0, ge=0, description="Seed of the new weights.")

    def convert(self, index: int, layer: LayerSpec, config: ModelConfig) -> LayerSpec | None:
        chosen = self.layers or tuple(range(1, config.num_layers, 2))
        beyond = [one for one in chosen if not 0 <= one < config.num_layers]
        if beyond:
            raise SpecError(
                f"{self.kind}: layers names {beyond[0]} of a model with {config.num_layers} layers",
                fix=f"name layers from 0 to {config.num_layers - 1}",
            )
        if index not in chosen:
            return None
        mixer = layer.mixer
        if mixer.kind not in ATTENTION:
            if not self.layers:
                return None
            raise SpecError(
                f"{self.kind}: layer {index} mixes with '{mixer.kind}', which has no projections of attention",
                fix="name layers with attention",
            )
        must_be_plain(self.kind, index, mixer, "qkv_bias", "out_bias", "qk_norm")
        found = {"kind": self.mixer, "num_heads": mixer.num_heads, "head_dim": mixer.head_dim}
        fields = MIXERS[self.mixer].model_fields
        if "value_head_dim" in fields:
            found["value_head_dim"] = mixer.head_dim
        if "rope" in fields:
            found["rope"] = mixer.rope.model_dump(mode="json")
        return type(layer).read({**layer.model_dump(mode="json"), "mixer": found})

    def recipe(self, index: int, made: Any, source: ModelConfig, config: ModelConfig) -> Any:
        if config.layers[index].mixer == source.layers[index].mixer:
            return None
        return projected.recipe(index, made, source, f"{self.seed}/linearize/{made.name}")
