"""Rounding of keys and values as a KV cache of 8 bits stores them, with scales that a checkpoint has beside its attention.

Shapes: KV key/value heads of Dh channels; scales [1] for a layer or [KV, 1, 1], as compressed-tensors stores them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.config import ModelConfig
from hone.model.quantized.scheme import CacheScheme
from hone.ops.rounding.inputs import encode


class KVRounding(nn.Module):
    """Keys (after the rotation) and values rounded to 8 bits and back, as an attention reads them from such a cache.

    Computed in float32 (float64 for float64): what lies beyond the largest code becomes that code.
    """

    def __init__(self, scheme: CacheScheme, num_kv_heads: int) -> None:
        super().__init__()
        self.scheme = scheme
        shape = scale_shape(scheme, num_kv_heads)
        self.register_buffer("k_scale", torch.empty(shape))
        self.register_buffer("v_scale", torch.empty(shape))

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [..., KV, Dh] -> the same, rounded."""
        return self._rounded(k, self.k_scale), self._rounded(v, self.v_scale)

    def extra_repr(self) -> str:
        return f"{self.scheme.number}, a scale per {self.scheme.per}"

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        found = encode(x, self.scheme.rounding, {"input_scale": scale.view(-1, 1)})
        return (found.codes * found.scales).to(x.dtype)


def scale_shape(scheme: CacheScheme, num_kv_heads: int) -> tuple[int, ...]:
    """Shape of the scale of the keys, and of that of the values, of one layer."""
    return (1,) if scheme.per == "tensor" else (num_kv_heads, 1, 1)


def scale_names(config: ModelConfig, index: int) -> dict[str, str]:
    """Checkpoint names of the scales of layer `index`: {"k_scale": "model.layers.0.self_attn.k_scale", "v_scale": ...}.

    Raises ArtifactError for a mixer that caches no keys and values of its own.
    """
    if "mixer.qkv" not in config.linears(index):
        raise _other(config.layers[index].mixer.kind)
    attention = next(iter(config.modules(index, "mixer.qkv"))).rpartition(".")[0]
    return {name: f"{attention}.{name}" for name in ("k_scale", "v_scale")}


def add_rounding(layer: nn.Module, scheme: CacheScheme) -> None:
    """Gives the attention of a decoder layer a `KVRounding` whose scales are not set yet. Raises ArtifactError for another mixer."""
    if not hasattr(layer.mixer, "kv_rounding"):
        raise _other(layer.mixer.spec.kind)
    layer.mixer.kv_rounding = KVRounding(scheme, layer.mixer.spec.num_kv_heads)


def rounding_paths(layer: nn.Module, config: ModelConfig, index: int) -> dict[str, str]:
    """Paths of the scales below a decoder layer and their checkpoint names; none where its cache is not rounded."""
    if getattr(layer.mixer, "kv_rounding", None) is None:
        return {}
    return {f"mixer.kv_rounding.{name}": stored for name, stored in scale_names(config, index).items()}


def _other(kind: str) -> ArtifactError:
    return ArtifactError(
        f"quantization_config has kv_cache_scheme, and a layer's mixer is {kind}: hone rounds keys and values of attention",
        fix="load the model it was made from",
    )
