"""What a mixer is told about the tokens it sees: their positions and who may see whom. Passed as an argument, never global.

A context lives for one forward pass. Training and scoring use `Causal` and `Packed`; serving brings its own (keys and
values in pages) by subclassing `Context`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError


class KeyValues(NamedTuple):
    """Keys and values of what the next token may see, oldest first: k [B, m, KV, Dh], v [B, m, KV, Dv]."""

    k: Tensor
    v: Tensor


class Context:
    """Base of every context. A subclass sets `positions` and writes `attend`."""

    positions: Tensor
    """int64, the leading shape of the tokens: each token's distance from the start of its document."""

    start: int = 0
    """Tokens of each row that earlier passes took in (only `carry` knows of them)."""

    document_ids: Tensor | None = None
    """int64 [B, S] where rows hold several documents: a number that is the same for the tokens of one, rising along a row."""

    carry: dict[int, Any] | None = None
    """None: sequences come whole. A dict: they come bit by bit, and a mixer finds there under its layer index what it left
    at the last pass (nothing at the start) and leaves what it will need, of bounded size where its mathematics allow."""

    cached: bool = False
    """Whether later passes go on from this one: `attend` and `attend_latent` then keep what they are given."""

    def __init__(self) -> None:
        self.memo: dict[Any, Any] = {}
        """What layers alike share in this pass, made by the first of them (a mixer's masks, say)."""
        self._rotary: dict[Any, tuple[Tensor, Tensor]] = {}
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}
        self._loss: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Tokens a row brings in this pass."""
        return self.positions.shape[-1]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention of the queries to every key this context lets them see.

        q [..., H, Dh], k and v [..., KV, Dh], rotated already; leading shape that of the tokens. Returns [..., H, Dh].
        With `window` w a token sees itself and the w - 1 tokens before it. `layer` is where a cache files k and v.
        k and v None: those that `layer` itself attended to in this pass, after it has lent them.
        """
        raise NotImplementedError

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, *, value_dim: int, scale: float) -> Tensor:
        """Causal attention of all heads to one latent a token, which is all that the cache keeps; only where `cached`.

        q [..., H, D], latent [..., D] of the new tokens; a value is the first `value_dim` numbers of a latent.
        Returns [..., H, value_dim].
        """
        raise NotImplementedError

    def expect(self, x: Tensor, head_dim: int, window: int | None) -> None:
        """Says before the first layer that some will `attend` with heads of `head_dim` and that `window`, to x's device and dtype.

        What they share is made then: a layer may be compiled, or run a second time for its gradients, and must find the
        same each time.
        """

    def attend_joined(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of n queries q [B, n, H, Dh] that are the last n of the m keys k, v [B, m, KV, Dh].

        Only for a context with `carry`, to mixers that keep their keys in a form of their own.
        """
        raise NotImplementedError

    def must_be_whole(self, mixer: str) -> None:
        """Raises SpecError when sequences come bit by bit, for a `mixer` that sees later tokens."""
        if self.carry is not None:
            raise SpecError(f"mixer '{mixer}' sees later tokens: it cannot generate", fix="take a causal mixer")

    def turn_and_file(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """True if it has turned q where it lies and filed turned k, and v, for `attend(layer, q, None, None)`.

        A cache on a GPU does so in one kernel; by default the mixer turns them.
        """
        return False

    def lend(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Says that a later layer will attend to the keys and values of `layer`, before `layer` itself does."""
        self._lent[layer] = (k, v)

    def add_loss(self, loss: Tensor) -> None:
        """Adds a mean a token (a scalar) to what training minimises beside its objective; see `extra_loss`."""
        if (
            torch.is_grad_enabled()
        ):  # one sum, not a list: what a compiled layer sees of it must not change from layer to layer
            self._loss = loss if self._loss is None else self._loss + loss

    @property
    def extra_loss(self) -> Tensor | None:
        """The sum of what `add_loss` got in this pass, None when it got nothing."""
        return self._loss

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of this context's positions under `rope`, made once for all layers.

        Each broadcasts against [..., heads, head_dim / 2].
        """
        key = (rope.key, head_dim, dtype)
        if key not in self._rotary:
            positions = self._distinct_positions()
            angles = positions[..., None].float() * rope.frequencies(head_dim, positions.device)
            self._rotary[key] = (angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2))
        return self._rotary[key]

    def _distinct_positions(self) -> Tensor:
        """`positions` without leading axes along which they repeat."""
        return self.positions

    def _keys(self, layer: int, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """k and v, or what `layer` has lent."""
        if k is not None and v is not None:
            return k, v
        assert layer in self._lent, f"layer {layer} has lent no keys in this pass"
        return self._lent[layer]


class Causal(Context):
    """Each row of `tokens` [..., S] is one document; a token sees itself and what came before."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self._line = torch.arange(tokens.shape[-1], device=tokens.device)
        self.positions = self._line.expand(tokens.shape)
        self._masks: dict[int, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *, scale: float, window: int | None
    ) -> Tensor:
        k, v = self._keys(layer, k, v)
        if window is None or window >= self.seq_len:
            return fused(q, k, v, scale) if has_fused(q, v) else sdpa(q, k, v, None, scale)
        if has_fused(q, v):
            return fused(q, k, v, scale, window)
        return sdpa(q, k, v, self._mask(window), scale)

    def expect(self, x: Tensor, head_dim: int, window: int | None) -> None:
        if window is not None and window < self.seq_len and not runs_fused(x, head_dim):
            self._mask(window)

    def _mask(self, window: int) -> Tensor:
        if window not in self._masks:
            self._masks[window] = may_see(self._line[:, None], self._line, window)
        return self._masks[window]

    def _distinct_positions(self) -> Tensor:
        return self._line


class Packed(Context):
    """Rows of several documents, one after another; a document sees only itself and its positions start at 0.

    `document_ids` is an integer tensor [B, S]; a new document begins wherever the id changes.
    """

    def __init__(self, document_ids: Tensor) -> None:
        super().__init__()
        changes = torch.zeros_like(document_ids, dtype=torch.bool)
        changes[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
        places = torch.arange(document_ids.shape[-1], device=document_ids.device).expand(document_ids.shape)
        begins = torch.where(changes, places, 0).cummax(-1).values
        self.positions = places - begins
        self.document_ids = begins  # an id that comes back in a row is a new document
        self._places = places
        self._masks: dict[tuple[str, int | None], Any] = {}
        # One document a row is plain causal attention. Asking costs a device synchronisation, so only a CPU asks.
        self._whole = document_ids.device.type == "cpu" and not bool(changes.any())

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *, scale: float, window: int | None
    ) -> Tensor:
        k, v = self._keys(layer, k, v)
        window = None if window is None or window >= self.seq_len else window
        if self._whole and window is None:
            return sdpa(q, k, v, None, scale)
        if has_fused(q, v):
            return fused(q, k, v, scale, mask=self._documents(window))
        return sdpa(q, k, v, self._pairs(window), scale)

    def expect(self, x: Tensor, head_dim: int, window: int | None) -> None:
        window = None if window is None or window >= self.seq_len else window
        if not (self._whole and window is None):
            self._documents(window) if runs_fused(x, head_dim) else self._pairs(window)

    def _documents(self, window: int | None) -> Any:
        """The kernels' mask, one for all layers: its block lists are made once."""
        from hone.ops.attention.masks import documents

        key = ("documents", window)
        if key not in self._masks:
            self._masks[key] = documents(self.document_ids, window)
        return self._masks[key]

    def _pairs(self, window: int | None) -> Tensor:
        """bool [B, 1, S, S]: torch's mask."""
        key = ("pairs", window)
        if key not in self._masks:
            mask = may_see(self._places[..., :, None], self._places[..., None, :], window)
            mask &= self.document_ids[..., :, None] == self.document_ids[..., None, :]
            self._masks[key] = mask.unsqueeze(-3)
        return self._masks[key]


def has_fused(q: Tensor, v: Tensor) -> bool:
    """Whether `hone.ops.attend` runs a kernel of its own on these heads; elsewhere torch's attention is the better one."""
    return runs_fused(q, max(q.shape[-1], v.shape[-1]))


def runs_fused(x: Tensor, head_dim: int) -> bool:
    """As `has_fused`, for heads of `head_dim` on the device and in the dtype of x."""
    from hone.ops.dispatch import runs_kernel

    facts = {"head_dim": head_dim, "v_dim": head_dim, "block": 0, "dense": False, "plain": True}
    return runs_kernel("attend", x.device, dtype=x.dtype, **facts)


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, mask: Any = None) -> Tensor:
    """`hone.ops.attend` on [..., S, heads, Dh] with leading axes or without; causal unless a `mask` is given.

    Queries that are fewer than the keys stand at their end.
    """
    from hone.ops import attend
    from hone.ops.attention import masks

    if mask is None:
        mask = masks.CAUSAL if window is None else masks.window(window)
    if q.dim() == 3:
        return attend(q[None], k[None], v[None], mask, scale=scale)[0]
    return attend(q, k, v, mask, scale=scale)


def may_see(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where the key's place is not after the query's and, with a window, not too far before."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = True) -> Tensor:
    """Torch's attention on [..., S, heads, Dh]; where there is no mask it is `causal`, or every key is seen."""
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
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(-3, -2)
    return mixed[0] if flat else mixed
