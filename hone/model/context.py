"""What a mixer is told about the tokens it sees: their positions and who may see whom. Passed as an argument, never global.

A context lives for one forward pass. Training and scoring use `Causal` and `Packed`; serving brings its own (keys and
values in pages) by subclassing `Context`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Context:
    """Base of every context. A subclass sets `positions` and writes `attend`."""

    positions: Tensor
    """int64, the leading shape of the tokens: each token's distance from the start of its document."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Attention of the queries to every key this context lets them see.

        q [..., H, Dh], k and v [..., KV, Dh], rotated already; leading shape that of the tokens. Returns [..., H, Dh].
        With `window` w a token sees itself and the w - 1 tokens before it. `layer` is where a cache files k and v.
        """
        raise NotImplementedError

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of this context's positions under `rope`, made once for all layers.

        Each broadcasts against [..., heads, head_dim / 2].
        """
        memo = self.__dict__.setdefault("_rotary", {})
        key = (rope, head_dim, dtype)
        if key not in memo:
            positions = self._distinct_positions()
            angles = positions[..., None].float() * rope.frequencies(head_dim, positions.device)
            memo[key] = (angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2))
        return memo[key]

    def _distinct_positions(self) -> Tensor:
        """`positions` without leading axes along which they repeat."""
        return self.positions


class Causal(Context):
    """Each row of `tokens` [..., S] is one document; a token sees itself and what came before."""

    def __init__(self, tokens: Tensor) -> None:
        self.seq_len = tokens.shape[-1]
        self._line = torch.arange(self.seq_len, device=tokens.device)
        self.positions = self._line.expand(tokens.shape)
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        if window is None or window >= self.seq_len:
            return _sdpa(q, k, v, None, scale)
        if window not in self._masks:
            self._masks[window] = _may_see(self._line[:, None], self._line, window)
        return _sdpa(q, k, v, self._masks[window], scale)

    def _distinct_positions(self) -> Tensor:
        return self._line


class Packed(Context):
    """Rows of several documents, one after another; a document sees only itself and its positions start at 0.

    `document_ids` is an integer tensor [B, S]; a new document begins wherever the id changes.
    """

    def __init__(self, document_ids: Tensor) -> None:
        changes = torch.zeros_like(document_ids, dtype=torch.bool)
        changes[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
        places = torch.arange(document_ids.shape[-1], device=document_ids.device).expand(document_ids.shape)
        begins = torch.where(changes, places, 0).cummax(-1).values
        self.positions = places - begins
        self._begins = begins
        self._places = places
        self._masks: dict[int | None, Tensor] = {}
        # One document a row is plain causal attention. Asking costs a device synchronisation, so only a CPU asks.
        self._whole = document_ids.device.type == "cpu" and not bool(changes.any())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        seq_len = self.positions.shape[-1]
        if window is not None and window >= seq_len:
            window = None
        if self._whole and window is None:
            return _sdpa(q, k, v, None, scale)
        if window not in self._masks:
            mask = _may_see(self._places[..., :, None], self._places[..., None, :], window)
            mask &= self._begins[..., :, None] == self._begins[..., None, :]
            self._masks[window] = mask.unsqueeze(-3)
        return _sdpa(q, k, v, self._masks[window], scale)


def _may_see(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where the key's place is not after the query's and, with a window, not too far before."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's attention on [..., S, heads, Dh]; causal where there is no mask."""
    flat = q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    grouped = q.shape[-2] != k.shape[-2]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # Of CUDA's fused kernels only FlashAttention shares keys between heads, and it takes neither masks nor float32:
        # torch would fall back to keeping every score. Repeated keys are far smaller than scores.
        share = q.shape[-2] // k.shape[-2]
        k, v, grouped = k.repeat_interleave(share, -2), v.repeat_interleave(share, -2), False
    mixed = F.scaled_dot_product_attention(
        q.transpose(-3, -2),
        k.transpose(-3, -2),
        v.transpose(-3, -2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(-3, -2)
    return mixed[0] if flat else mixed
