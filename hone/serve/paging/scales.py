"""Which numbers a KV cache holds, and the scales of 8-bit ones: those of the model's folder, or computed when written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.cache import EIGHT_BITS, LayerCache, cache_dtype
from hone.model.decoder import Decoder
from hone.model.quantized.config import read
from hone.ops.dispatch import Where, choose, locate

_NUMBERS = {"e4m3": "float8_e4m3fn", "int": "int8"}
"""Dtypes of the caches that a folder's `kv_cache_scheme` describes."""

FixedScales = list[tuple[Tensor, Tensor] | None]
"""Scales of keys and values of each layer, float32 [KV]; None for a layer that caches none."""


class CacheFormat(NamedTuple):
    """The numbers of a KV cache: their dtype, and whether their scales are those of the folder."""

    dtype: str
    fixed: bool = False
    note: str = ""
    """What a user must know about the folder's scales."""


def cache_format(asked: str, weights: str, quantization: dict[str, Any] | None) -> CacheFormat:
    """For `engine.kv_cache_dtype` `asked`, weights of dtype `weights`, and config.json's `quantization_config`.

    A folder with scales for a cache of 8 bits is served from one when `asked` is auto (as vLLM does) or of its number format.
    """
    found = quantization if quantization and quantization.get("kv_cache_scheme") else None
    scheme = None if found is None else read(found).kv_cache
    if scheme is None:
        return CacheFormat(cache_dtype(asked, weights))
    stored = _NUMBERS[scheme.number]
    dtype = stored if asked == "auto" else cache_dtype(asked, weights)
    if dtype == stored:
        return CacheFormat(dtype, True, f"keys and values are {dtype} with the folder's scales for each {scheme.per}")
    how = " with a scale for each token and head" if dtype in EIGHT_BITS.values() else ""
    note = f"the folder has scales for a KV cache of {stored}, which are not used: keys and values are {dtype}{how}"
    return CacheFormat(dtype, False, note)


def take_scales(model: Decoder) -> FixedScales:
    """The scales of the KV cache of every layer, taken out of the model: its layers round keys and values no more."""
    taken: FixedScales = []
    for layer in model.layers:
        rounding = getattr(layer.mixer, "kv_rounding", None)
        if rounding is None:
            taken.append(None)
            continue
        layer.mixer.kv_rounding = None
        heads = layer.mixer.spec.num_kv_heads
        k, v = (scale.detach().float().reshape(-1) for scale in (rounding.k_scale, rounding.v_scale))
        taken.append((k.expand(heads).contiguous(), v.expand(heads).contiguous()))
    return taken


def check_format(dtype: str, tensors: Sequence[LayerCache], weights: str, where: Where) -> None:
    """Raises SpecError for a cache of 8 bits of a model or a device that has none. `weights`: dtype of the queries."""
    if dtype not in EIGHT_BITS.values():
        return
    asked = "fp8" if dtype == "float8_e4m3fn" else dtype
    for index, layer in enumerate(tensors):
        if layer and {one.name for one in layer} != {"k", "v"}:
            raise SpecError(
                f"engine.kv_cache_dtype is {asked}, and layer {index} caches a latent, not keys and values of heads",
                fix="leave engine.kv_cache_dtype out",
            )
        if not layer or where.kind != "cuda" or weights not in ("bfloat16", "float16"):
            continue  # plain torch takes any width
        widths = {one.name: one.shape[-1] for one in layer}
        case = {"dtype": getattr(torch, weights), "page_dtype": getattr(torch, dtype), "rows": 1}
        choice = choose("attend_paged", where, head_dim=widths["k"], v_dim=widths["v"], **case)
        if choice.backend != "triton":
            raise SpecError(
                f"engine.kv_cache_dtype is {asked}, and layer {index} has heads of {widths['k']} and {widths['v']}: {choice.reason}",
                fix="use engine.kv_cache_dtype=auto, or bfloat16 where the folder has scales for a cache of 8 bits",
            )


def check_on(dtype: str, tensors: Sequence[LayerCache], weights: torch.dtype, device: torch.device) -> None:
    """`check_format` on a device of this machine."""
    check_format(dtype, tensors, str(weights).removeprefix("torch."), locate(device))
