"""The tensors of the KV cache: those that each layer's mixer declares, in pages allocated at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import FitError, SpecError
from hone.base.figure import human_bytes
from hone.cost.cache import CacheTensor, LayerCache, page_bytes
from hone.model.config import ModelConfig
from hone.serve.kv_policies.policy import KeptTokens
from hone.serve.step import NULL_PAGE


def cache_tensors(config: ModelConfig) -> list[LayerCache]:
    """The paged tensors of every layer. Raises SpecError naming the first layer that the engine cannot serve."""
    if config.prompt is not None:
        raise SpecError(
            f"'{config.prompt.kind}' puts keys and values before the tokens, which the engine's pages do not hold",
            fix="write with `hone generate`, `hone chat` or hone.model.incremental.generate, or serve an adapter around linears",
        )
    unserved = first_unserved(config)
    if unserved is not None:
        index, kind = unserved
        raise SpecError(
            f"layer {index}: mixer '{kind}' keeps no keys and values in pages, which the engine needs",
            fix="write with `hone generate` or hone.model.incremental.generate, or serve a model of attention layers",
        )
    config.must_be_causal("a request's text would depend on tokens that are not there yet")
    return [layer.mixer.cache() for layer in config.layers]


def first_unserved(config: ModelConfig) -> tuple[int, str] | None:
    """(index, mixer) of the first layer that the engine cannot serve: its state is not, or not all, in pages; with a soft prompt the
    first layer, and the prompt's kind."""
    if config.prompt is not None:
        return 0, config.prompt.kind
    for index, layer in enumerate(config.layers):
        declared = layer.mixer.cache()
        if not all(one.paged for one in declared) or not (declared or layer.mixer.reuses_kv):
            return index, layer.mixer.kind
    return None


def has_softcap(config: ModelConfig) -> bool:
    """Whether a layer caps its scores, which not every kernel over pages does."""
    return any(getattr(layer.mixer, "softcap", None) is not None for layer in config.layers)


class KVCache:
    """`layers[i][name]` is the paged tensor `name` of layer i: [num_pages + 1, *shape[:-1], block_size, shape[-1]].

    Page 0 is the null page. Tensors of one shape and dtype share one allocation over all layers. `declared` are the
    layers' tensors (a layer that uses another's has none); `dtype` is the dtype of those that declare none. `rope_len` is
    the sequence length of the rotary positions of its keys, where they depend on it: the longest that the engine serves,
    as in vLLM, because cached keys are never rotated again.

    A cache of 8 bits (`dtype` float8_e4m3fn or int8) has scales, `scales[i]`: {"k_scale", "v_scale"}, float32, by which
    the numbers of layer i are multiplied when they are read. They are [num_pages + 1, KV, block_size], one for each token
    and head, computed when it is written; or [KV], those of `fixed_scales[i]`.
    """

    def __init__(
        self,
        declared: Sequence[LayerCache],
        num_pages: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rope_len: int | None = None,
        kept: KeptTokens | None = None,
        fixed_scales: Sequence[tuple[Tensor, Tensor] | None] | None = None,
    ) -> None:
        self.kept = kept or KeptTokens()
        """What layers attend to of each sequence, by its KV policy."""
        self.block_size = block_size
        self.rope_len = rope_len
        self.num_pages = num_pages
        self.dtype = dtype
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        """Rotary cosines and sines of every position so far; `Paged` fills and reads it."""
        self.steps: dict[Any, Any] = {}
        """Compiled decode steps over these pages by the model that they run (`hone.serve.paging.compiled_step`)."""
        self.layers: list[dict[str, Tensor]] = [{} for _ in declared]
        self.stores: list[Tensor] = []
        """The allocations: [layers, num_pages + 1, *shape[:-1], block_size, shape[-1]] each."""
        name = str(dtype).removeprefix("torch.")
        self.scales: list[dict[str, Tensor]] = [{} for _ in declared]
        needed = (num_pages + 1) * page_bytes(declared, block_size, name, fixed_scales=fixed_scales is not None)
        alike: dict[tuple[tuple[int, ...], str], list[tuple[int, CacheTensor]]] = {}
        for layer, tensors in enumerate(declared):
            for one in tensors:
                assert one.paged, f"layer {layer}: '{one.name}' has one tensor per sequence and no pages"
                alike.setdefault((one.shape, name if one.dtype == "auto" else one.dtype), []).append((layer, one))
        try:
            for (shape, kind), members in alike.items():
                whole = (len(members), num_pages + 1, *shape[:-1], block_size, shape[-1])
                store = self._store(whole, getattr(torch, kind), device)
                scaled = any(one.scale_bytes(name) for _, one in members)
                scales = self._store(whole[:-1], torch.float32, device) if scaled and fixed_scales is None else None
                for place, (layer, one) in enumerate(members):
                    self.layers[layer][one.name] = store[place]
                    if scales is not None:
                        self.scales[layer][f"{one.name}_scale"] = scales[place]
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise FitError(
                f"a KV cache of {num_pages} pages needs {human_bytes(needed)}, which cannot be allocated on {device}: "
                f"{str(error).splitlines()[0]}",
                fix="lower engine.kv_cache_memory_bytes or engine.num_pages, or use a smaller model or number format",
            ) from None

        for layer, fixed in enumerate(fixed_scales or ()):
            if fixed is not None:
                self.scales[layer] = {"k_scale": fixed[0].to(device), "v_scale": fixed[1].to(device)}

    def _store(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A new tensor [layers, num_pages + 1, ...] whose null page is zero. The others are wiped when they are allocated,
        and on a CPU untouched memory is not resident."""
        store = torch.empty(shape, dtype=dtype, device=device)
        _fill(store, [NULL_PAGE], 0.0)
        self.stores.append(store)
        return store

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self.stores)

    def wipe(self, pages: Sequence[int], value: float = 0.0) -> None:
        """Fills `pages` of every layer: with zero before a page is used, so that unwritten slots are finite.

        Attention multiplies unwritten slots by a probability of zero, and zero times NaN would be NaN.
        """
        if len(pages):
            for store in self.stores:
                _fill(store, pages, value)


def _fill(store: Tensor, pages: Sequence[int], value: float) -> None:
    """Fills pages of a store; integers take 0 for any value."""
    index = torch.as_tensor(pages, device=store.device)
    if store.dtype == torch.float8_e4m3fn:  # torch fills no float8: its bytes, of which 127 is not a number
        store.view(torch.int8).index_fill_(1, index, 0 if value == 0 else 127)
    else:
        store.index_fill_(1, index, value if store.is_floating_point() else 0)
