"""The context of a forward pass: the tokens' positions and which keys each query attends to. An argument, never global.

A context lives for one forward pass. Training and scoring use `Causal` and `Packed`; serving has a subclass of its own,
`hone.serve.paging.paged.Paged`, with keys and values in pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.norm import RMSNorm


class KeyValues(NamedTuple):
    """Keys and values that the next token attends to, oldest first: k [B, m, KV, Dh], v [B, m, KV, Dv]."""

    k: Tensor
    v: Tensor


class Context:
    """Base of every context. A subclass sets `positions` and writes `attend`."""

    positions: Tensor
    """int64, the leading shape of the tokens: each token's distance from the start of its document."""

    start: int = 0
    """Tokens of each sequence that earlier passes processed; their state is in `carry`."""

    document_ids: Tensor | None = None
    """int64 [B, S] where a sequence packs several documents: the number of each token's document, rising along the sequence."""

    carry: dict[int, Any] | None = None
    """None: a pass holds whole sequences. A dict: sequences come in chunks, and each mixer stores its state between
    chunks here, under its layer index. The state has a bounded size where the mixer's mathematics allow."""

    rope_len: int | None = None
    """The sequence length that rotary frequencies are taken for, where they depend on it (scaling dynamic, longrope).
    None: the length of this pass's sequences, as transformers has it. A context with a cache fixes it for all passes,
    since cached keys keep their rotation."""

    measures: bool = False
    """Whether a pass with gradients only measures a model: routers then neither drop nor balance, as in a pass without gradients."""

    real: Tensor | None = None
    """bool, in the shape of the tokens: false for those that only pad a pass to its size. None: all are real."""

    taps: dict[int, Tensor | None] | None = None
    """Hidden states after the layers whose indices are its keys, which a training pass stores; None: none are wanted."""

    values: Tensor | None = None
    """float32 [B, S, K], what the objective of a training pass knows of each position; None: nothing."""

    cached: bool = False
    """Whether later passes continue this one: `attend` and `attend_latent` then store their keys and values."""

    def __init__(self) -> None:
        self.memo: dict[Any, Any] = {}
        """Tensors that several layers share in this pass (masks), computed by the first of them."""
        self._rotary: dict[Any, tuple[Tensor, Tensor]] = {}
        self._shared_kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._loss: Tensor | None = None
        self.tokens: Tensor | None = None
        """int64, the token ids of this pass; None where layers run without their embedding."""
        self.draw: int | None = None
        """In a training pass, the number on which all that is random in it depends; None: nothing is random."""
        self.routing: dict[int, Tensor] = {}
        """What routers of layers counted in a pass with gradients, by layer; see `count_routes`."""

    def following(self, prompt: Mapping[int, KeyValues], count: int) -> Context:
        """The same pass, in which every document follows `count` places with the keys and values of `prompt` by layer, each [1, count, KV, Dh].

        A pass that continues others needs none of these. Raises SpecError where it has no place for them.
        """
        raise SpecError(
            f"{type(self).__name__} passes cannot follow a soft prompt",
            fix="write with `hone generate`, score with `hone eval`, or take an adapter around linears",
        )

    def run_layers(self, decoder: Any, x: Tensor) -> Tensor | None:
        """The output of all layers of `decoder` for embeddings x, where the context has one kernel for them; else None."""
        return None

    @property
    def seq_len(self) -> int:
        """New tokens of each sequence in this pass."""
        return self.positions.shape[-1]

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
        """Attention of the queries to every key that is visible to them in this context.

        q [..., H, Dh], k and v [..., KV, Dh], rotated already; leading shape that of the tokens. Returns [..., H, Dh].
        With `window` w a token attends to itself and the w - 1 tokens before it; with `softcap` c a score s becomes
        c tanh(s / c); `sinks` [H] are one more score a head, without a value. A cache stores k and v under `layer`.
        k and v None: those that `layer` gave to `share_kv` or `rotate_and_cache` in this pass.
        """
        raise NotImplementedError

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, *, value_dim: int, scale: float) -> Tensor:
        """Causal attention of all heads to one latent per token; the cache stores the latent only. For contexts that are `cached`.

        q [..., H, D], latent [..., D] of the new tokens; the first `value_dim` numbers of a latent are its value.
        Returns [..., H, value_dim].
        """
        raise NotImplementedError

    def expect(
        self, x: Tensor, head_dim: int, window: int | None, *, softcap: float | None = None, sinks: bool = False
    ) -> None:
        """Prepares masks for layers that will `attend` with heads of `head_dim` and these options, for x's device and dtype.

        Called before the first layer: a layer may be compiled, or run again for activation checkpointing, and must read
        the same tensors each time.
        """

    def attend_joined(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of n queries q [B, n, H, Dh] that are the last n of the m keys k, v [B, m, KV, Dh].

        Only for a context with `carry`, and for mixers that store their keys in a form of their own.
        """
        raise NotImplementedError

    def must_be_whole(self, mixer: str) -> None:
        """Raises SpecError when sequences come in chunks, for a `mixer` that attends to later tokens."""
        if self.carry is not None:
            raise SpecError(f"mixer '{mixer}' attends to later tokens: it cannot generate", fix="take a causal mixer")

    def rotate_and_cache(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> bool:
        """Rotates q in place, writes rotated k and v to the cache, and returns True; call `attend(layer, q, None, None)` then.

        `norms`: of query and key heads, before the rotation. Returns False, with nothing done, where no kernel does this
        at once: the mixer then norms and rotates q and k itself.
        """
        return False

    def share_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values of `layer` for later layers that attend to them; called before `layer` attends itself."""
        self._shared_kv[layer] = (k, v)

    def add_loss(self, loss: Tensor) -> None:
        """Adds an auxiliary loss (a scalar, the mean over tokens) to the training objective; see `extra_loss`."""
        if torch.is_grad_enabled():  # one sum, not a list: a compiled layer is traced again when a list grows
            self._loss = loss if self._loss is None else self._loss + loss

    @property
    def extra_loss(self) -> Tensor | None:
        """The sum of the losses given to `add_loss` in this pass; None without any."""
        return self._loss

    def count_routes(self, layer: int, counts: Tensor) -> None:
        """Stores the `counts` of a mixture of experts, float64 [E + 3] (`hone.model.feed_forwards.moe`), once however often it runs."""
        self.routing[layer] = counts

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of this context's positions under `rope`, made once for all layers.

        Each broadcasts against [..., heads, head_dim / 2]. `head_dim` is the number of channels that are rotated.
        """
        key = (rope.key, head_dim, dtype)
        if key not in self._rotary:
            seq_len = self._rope_len() if rope.by_length else None
            self._rotary[key] = rope.tables(self._distinct_positions(), head_dim, dtype, seq_len)
        return self._rotary[key]

    def _rope_len(self) -> int | None:
        """The sequence length that rotary frequencies are taken for."""
        return self.seq_len if self.rope_len is None else self.rope_len

    def _distinct_positions(self) -> Tensor:
        """`positions` without leading axes along which they repeat."""
        return self.positions

    def keys_and_values(self, layer: int, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """k and v, or those that `layer` has shared."""
        if k is not None and v is not None:
            return k, v
        assert layer in self._shared_kv, f"layer {layer} has shared no keys in this pass"
        return self._shared_kv[layer]


class Causal(Context):
    """Each sequence of `tokens` [..., S] is one document; a token attends to itself and the tokens before it."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self._line = torch.arange(tokens.shape[-1], device=tokens.device)
        self.positions = self._line.expand(tokens.shape)
        self._masks: dict[int, Tensor] = {}

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
        window = None if window is None or window >= self.seq_len else window
        if softcap is not None or sinks is not None or has_fused(q, v):
            return fused(q, k, v, scale, window, softcap=softcap, sinks=sinks)
        return sdpa(q, k, v, None if window is None else self._mask(window), scale)

    def expect(
        self, x: Tensor, head_dim: int, window: int | None, *, softcap: float | None = None, sinks: bool = False
    ) -> None:
        plain = softcap is None and not sinks
        if plain and window is not None and window < self.seq_len and not runs_fused(x, head_dim):
            self._mask(window)

    def _mask(self, window: int) -> Tensor:
        if window not in self._masks:
            self._masks[window] = is_visible(self._line[:, None], self._line, window)
        return self._masks[window]

    def _distinct_positions(self) -> Tensor:
        return self._line


class Packed(Context):
    """Sequences that pack several documents; attention stays within a document, and its positions start at 0.

    `document_ids` is an integer tensor [B, S]; a new document begins wherever the id changes.
    """

    def __init__(self, document_ids: Tensor) -> None:
        super().__init__()
        changes = torch.zeros_like(document_ids, dtype=torch.bool)
        changes[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
        places = torch.arange(document_ids.shape[-1], device=document_ids.device).expand(document_ids.shape)
        begins = torch.where(changes, places, 0).cummax(-1).values
        self.positions = places - begins
        self.document_ids = begins  # an id that returns later in a sequence is a new document
        self._places = places
        self._masks: dict[tuple[str, int | None], Any] = {}
        # One document per sequence is plain causal attention. The test synchronises a GPU, so only a CPU makes it.
        self._whole = document_ids.device.type == "cpu" and not bool(changes.any())

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
        window = None if window is None or window >= self.seq_len else window
        if softcap is not None or sinks is not None:
            return fused(q, k, v, scale, mask=self._documents(window), softcap=softcap, sinks=sinks)
        if self._whole and window is None:
            return sdpa(q, k, v, None, scale)
        if has_fused(q, v):
            return fused(q, k, v, scale, mask=self._documents(window))
        return sdpa(q, k, v, self._pairs(window), scale)

    def expect(
        self, x: Tensor, head_dim: int, window: int | None, *, softcap: float | None = None, sinks: bool = False
    ) -> None:
        window = None if window is None or window >= self.seq_len else window
        if softcap is not None or sinks:
            self._documents(window)
        elif not (self._whole and window is None):
            self._documents(window) if runs_fused(x, head_dim) else self._pairs(window)

    def _documents(self, window: int | None) -> Any:
        """The kernels' mask, shared by all layers: its block lists are computed once."""
        from hone.ops.attention.masks import documents

        key = ("documents", window)
        if key not in self._masks:
            self._masks[key] = documents(self.document_ids, window)
        return self._masks[key]

    def _pairs(self, window: int | None) -> Tensor:
        """bool [B, 1, S, S]: torch's mask."""
        key = ("pairs", window)
        if key not in self._masks:
            mask = is_visible(self._places[..., :, None], self._places[..., None, :], window)
            mask &= self.document_ids[..., :, None] == self.document_ids[..., None, :]
            self._masks[key] = mask.unsqueeze(-3)
        return self._masks[key]


def has_fused(q: Tensor, v: Tensor) -> bool:
    """Whether `hone.ops.attend` has a kernel for these heads; elsewhere torch's attention is faster."""
    return runs_fused(q, max(q.shape[-1], v.shape[-1]))


def runs_fused(x: Tensor, head_dim: int) -> bool:
    """As `has_fused`, for heads of `head_dim` on the device and in the dtype of x."""
    from hone.ops.dispatch import runs_kernel

    case = {"head_dim": head_dim, "v_dim": head_dim, "block": 0, "dense": False, "plain": True}
    return runs_kernel("attend", x.device, dtype=x.dtype, **case)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    mask: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`hone.ops.attend` on [..., S, heads, Dh] with leading axes or without; causal unless a `mask` is given.

    Fewer queries than keys are aligned with the last keys.
    """
    from hone.ops import attend
    from hone.ops.attention import masks

    if mask is None:
        mask = masks.CAUSAL if window is None else masks.window(window)
    if q.dim() == 3:
        return attend(q[None], k[None], v[None], mask, scale=scale, softcap=softcap, sinks=sinks)[0]
    return attend(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)


def is_visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where the key's place is not after the query's and, with a window, not too far before."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = True) -> Tensor:
    """Torch's attention on [..., S, heads, Dh]; without a mask it is `causal` or attends to every key."""
    flat = q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    grouped = q.shape[-2] != k.shape[-2]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # Of CUDA's fused kernels only FlashAttention shares keys between heads, and it takes neither masks nor float32:
        # torch would fall back to materialising every score, which takes far more memory than repeated keys.
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
