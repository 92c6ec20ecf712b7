"""Contexts of passes with a soft prompt: tokens that attend to its keys and values, and the pass that records those of embeddings.

Legend: B sequences, S tokens of each, n places of the prompt, KV key/value heads, Dh their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.model.context import Causal, Context, KeyValues, Packed, fused, has_fused, runs_fused, sdpa
from hone.ops.attention.masks import Mask

Prompted = Mapping[int, KeyValues]
"""Rotated keys and values of the prompt by layer, each [1, n, KV, Dh]."""


class Recording(Causal):
    """A pass over a prompt's embeddings [1, n, D], which keeps the keys and values of every layer."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(tokens)
        self.kept: dict[int, KeyValues] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        """As `Causal.attend`."""
        k, v = self.keys_and_values(layer, k, v)
        self.kept[layer] = KeyValues(k, v)
        return super().attend(layer, q, k, v, **options)


class Prefixed(Context):
    """The pass of `context`, a `Causal` or `Packed` one, in which every document follows the prompt."""

    def __init__(self, context: Causal | Packed, prompt: Prompted, count: int) -> None:
        super().__init__()
        self.positions = context.positions + count
        self.document_ids, self.measures, self.real = context.document_ids, context.measures, context.real
        self.taps, self.tokens, self.draw, self.routing = context.taps, context.tokens, context.draw, context.routing
        self.rope_len = context.seq_len + count if context.rope_len is None else context.rope_len
        self._prompt, self._count, self._masks = prompt, count, dict[Any, Any]()
        begins = context.document_ids
        first = torch.zeros(1, 1, dtype=torch.int64, device=self.positions.device) if begins is None else begins
        self._begins = (first + count).unsqueeze(-2).int()
        """The place among all keys of the first of each query's document, int32 [B or 1, 1, S or 1]."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        k, v = self.keys_and_values(layer, k, v)
        first = self._prompt[layer]
        k, v = (
            torch.cat(
                (one.to(own.dtype).expand(*own.shape[:-3], -1, -1, -1) if own.dim() > 3 else one[0].to(own.dtype), own),
                -3,
            )
            for one, own in zip(first, (k, v), strict=True)
        )
        window = None if window is None or window >= k.shape[-3] else window
        if softcap is not None or sinks is not None or has_fused(q, v):
            return fused(q, k, v, scale, mask=self._mask(window), softcap=softcap, sinks=sinks)
        return sdpa(q, k, v, self._pairs(window), scale)

    def expect(
        self, x: Tensor, head_dim: int, window: int | None, *, softcap: float | None = None, sinks: bool = False
    ) -> None:
        window = None if window is None or window >= self.seq_len + self._count else window
        if softcap is not None or sinks or runs_fused(x, head_dim):
            self._mask(window)
        else:
            self._pairs(window)

    def _mask(self, window: int | None) -> Mask:
        key = ("mask", window)
        if key not in self._masks:
            rule, params = (_after, (self._count,)) if window is None else (_after_in_window, (self._count, window))
            self._masks[key] = Mask(rule, params, q_data=self._begins)
        return self._masks[key]

    def _pairs(self, window: int | None) -> Tensor:
        """bool [B or 1, 1, S, n + S]: torch's mask."""
        key = ("pairs", window)
        if key not in self._masks:
            sizes = (self.seq_len, self.seq_len + self._count)
            self._masks[key] = self._mask(window).dense(*sizes, self.positions.device)
        return self._masks[key]


def after(context: Context, prompt: Prompted, count: int) -> Context:
    """`context` with every document after the `count` places of `prompt`.

    Raises SpecError for a context that has no place for a prompt.
    """
    if type(context) in (Causal, Packed):
        return Prefixed(context, prompt, count)  # type: ignore[arg-type]
    return context.following(prompt, count)


# Rules of masks (`hone.ops.attention.masks`); params are n and the window.


def _after(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (k < params[0]) | ((q >= k) & (k >= q_data))


def _after_in_window(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return ((k < params[0]) & (q - q_data + params[0] - k < params[1])) | (
        (q >= k) & (k >= q_data) & (q - k < params[1])
    )
