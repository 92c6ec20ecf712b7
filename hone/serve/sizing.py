"""How many pages the cache gets: from a count, from bytes, or from a part of the free memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from hone.base.errors import FitError, SpecError
from hone.base.figure import human_bytes
from hone.model.config import ModelConfig
from hone.model.folder import weights_bytes
from hone.serve.spec import EngineSpec

_SMALL_PARAMS, _SMALL_FLOPS = 8_000_000, 4e9
"""Model and step up to which one CPU thread is faster than several; measured on two cores, idle and busy."""


def kv_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(num_kv_heads, head_dim) of every layer. Raises SpecError naming the first whose mixer keeps no keys in pages."""
    shapes = []
    for index, layer in enumerate(config.layers):
        shape = layer.mixer.paged_shape()
        if shape is None:
            raise SpecError(
                f"layer {index}: mixer '{layer.mixer.kind}' keeps no keys and values in pages, which the engine serves from",
                fix="write with `hone generate` or hone.model.incremental.generate, or serve a model of attention layers",
            )
        shapes.append(shape)
    return shapes


def cache_pages(spec: EngineSpec, one: int, device: torch.device, max_model_len: int, taken: int = 0) -> int:
    """Pages for an engine whose page takes `one` bytes (that of a draft model, which shares page numbers, included).

    Without a count or bytes: what `max_rows` longest sequences fill, at most `memory_fraction` of the free memory.
    `taken` bytes of what is free now are spoken for (weights that are not there yet). Raises FitError when not even one
    page fits.
    """
    if spec.num_pages is not None:
        # A CPU would hand out pages lazily and be killed for it in the middle of a request.
        free = max(0, _free_now(device) - taken)
        if (spec.num_pages + 1) * one > free:
            raise FitError(
                f"{spec.num_pages} pages of {human_bytes(one)} are {human_bytes((spec.num_pages + 1) * one)}, "
                f"{device} has {human_bytes(free)} free",
                fix=f"at most engine.num_pages={max(0, free // one - 1)} fit now; leave it out to size the cache by what is free",
            )
        return spec.num_pages
    if spec.cache_bytes is not None:
        given, source = spec.cache_bytes, "engine.cache_bytes"
    else:
        given, source = _free_bytes(spec, device, taken), f"that part of the free memory of {device}"
    count = given // one - 1  # the null page
    if count < 1:
        raise FitError(
            f"{source} is {human_bytes(given)}, a KV cache of one page needs {human_bytes(2 * one)}",
            fix="raise engine.cache_bytes, free some memory, or use a smaller model",
        )
    if spec.cache_bytes is None:
        count = min(count, spec.max_rows * -(-max_model_len // spec.page_size))
    return int(count)


def check_weights(folder: Path | str, device: torch.device) -> None:
    """Raises FitError when the weights in `folder` are more than the free memory of `device`."""
    needed = weights_bytes(folder)
    free = _free_now(device)
    if needed > free:
        raise FitError(
            f"the weights in {folder} take {human_bytes(needed)}, {device} has {human_bytes(free)} free",
            fix="compress the model (hone compress), use a smaller one, or another device",
        )


def _free_now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def step_threads(spec: EngineSpec, num_params: int, num_tokens: int, available: int) -> int:
    """CPU threads for a step of `num_tokens`: one where meeting after every operation costs more than sharing saves."""
    small = num_params <= _SMALL_PARAMS and 2 * num_params * num_tokens <= _SMALL_FLOPS
    return spec.num_threads or (1 if small else available)


def _free_bytes(spec: EngineSpec, device: torch.device, taken: int) -> int:
    default = 0.9 if device.type == "cuda" else 0.3
    return int(max(0, _free_now(device) - taken) * (spec.memory_fraction or default))
