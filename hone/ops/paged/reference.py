"""Paged attention in plain torch for the CPU: sequences of similar size are padded and computed in a few large calls.

Legend: T flat new tokens, R sequences, n new tokens and P pages of a sequence (padded), L = P * page_size slots,
H query heads, KV key/value heads, G = H / KV, Dh head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_FREE_SLOTS = 2048
"""Padded slots that cost as much as the calls of another group (about 60 us on a CPU core, less on a GPU)."""

_MASK_VALUES = 2**25
"""Most mask values that exist at once: chunks of longer prompts are computed in blocks of queries."""


@dataclass(frozen=True)
class Extras:
    """Options of `hone.ops.attend_paged` besides scale and window.

    Scales are [num_pages, KV, page_size] here. With `value_dim` pages hold latents: values are the first columns of keys.
    """

    sink_tokens: int = 0
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    value_dim: int | None = None
    softcap: float | None = None
    tree: Tensor | None = None


_PLAIN = Extras()


@dataclass
class _Group:
    """Sequences of one call, padded to common n and P."""

    table: Tensor  # [R, P] page ids
    positions: Tensor  # [R, n] position of each query in its sequence; 0 where padded
    fresh: bool  # every sequence starts at 0: plain causal, no mask needed
    queries: slice | Tensor  # positions of the queries among the flat tokens: [R * n] if a tensor
    outputs: tuple[Tensor, Tensor] | None  # (indices in [R * n], flat indices) of real queries, if some are padding
    memo: dict = field(default_factory=dict)

    def gather_index(self, num_kv_heads: int) -> Tensor:
        """int64 [R * KV * P]: rows of the pages viewed as [num_pages * KV, page_size * Dh]."""
        if num_kv_heads not in self.memo:
            heads = torch.arange(num_kv_heads, device=self.table.device)
            self.memo[num_kv_heads] = (self.table[:, None, :] * num_kv_heads + heads[:, None]).flatten()
        return self.memo[num_kv_heads]

    def mask(
        self,
        page_size: int,
        window: int | None,
        groups: int,
        dtype: torch.dtype,
        queries: slice = slice(None),
        sink_tokens: int = 0,
        tree: Tensor | None = None,
    ) -> Tensor:
        """Additive [R, 1, n * G, L] for `queries` of each sequence: 0 where a query attends to the slot, -inf elsewhere.

        The G heads of a query are adjacent.
        """
        key = (window, groups, dtype, sink_tokens, tree is None)
        whole = queries == slice(None)
        if whole and key in self.memo:
            return self.memo[key]
        slots = torch.arange(self.table.shape[1] * page_size, device=self.table.device)
        place = self.positions[:, queries, None]
        hidden = slots > place
        if tree is not None:
            among = slots - self.positions[:, :1, None]  # the slot's number among the new ones
            hidden = (among >= 0) & (tree[: self.positions.shape[1]][queries, None] >> among.clamp(0, 63) & 1 == 0)
            hidden |= among >= self.positions.shape[1]
        if window is not None:
            past = slots <= place - window
            hidden |= past & (slots >= sink_tokens) if sink_tokens else past
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        if hidden.shape[1] > 1 and groups > 1:
            mask = mask.repeat_interleave(groups, dim=1)
        mask = mask.unsqueeze(1)
        if whole:
            self.memo[key] = mask
        return mask


@dataclass
class PagedPlan:
    """The plan that all layers of one step share: groups of sequences and the indices of their queries, pages and slots."""

    groups: list[_Group]
    num_tokens: int
    page_size: int


def plan_sequences(
    page_table: np.ndarray,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    page_size: int,
    device: torch.device | str = "cpu",
) -> PagedPlan:
    """Sorts sequences into groups of similar size. page_table int64 [R, P] on the host; lengths as in `attend_paged`."""
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    pages = [-(-length // page_size) for length in seq_lens]
    groups = []
    for seqs in _similar(query_lens, seq_lens, pages):
        longest = max(query_lens[seq] for seq in seqs)
        widest = max(pages[seq] for seq in seqs)
        lengths = np.array([query_lens[seq] for seq in seqs])
        ends = np.array([seq_lens[seq] for seq in seqs])
        step = np.arange(longest)
        real = step < lengths[:, None]
        flat = np.where(real, starts[seqs][:, None] + step, starts[seqs][:, None])
        positions = np.where(real, (ends - lengths)[:, None] + step, 0)
        outputs = None
        queries: slice | Tensor
        if real.all() and seqs == list(range(seqs[0], seqs[0] + len(seqs))):
            queries = slice(int(starts[seqs[0]]), int(starts[seqs[-1] + 1]))
        else:
            queries = _to(flat.ravel(), device)
            outputs = (_to(np.flatnonzero(real), device), _to(flat[real], device))
        groups.append(
            _Group(
                table=_to(page_table[seqs, :widest], device),
                positions=_to(positions, device),
                fresh=longest > 1 and bool((lengths == ends).all()),
                queries=queries,
                outputs=outputs,
            )
        )
    return PagedPlan(groups, int(starts[-1]), page_size)


def attend_planned(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    window: int | None = None,
    extras: Extras = _PLAIN,
) -> Tensor:
    """`attend_paged` with the plan of `plan_sequences`, which every layer of a step shares."""
    if len(plan.groups) == 1 and isinstance(plan.groups[0].queries, slice):
        return _attend_group(q, k_pages, v_pages, plan.groups[0], scale, window, extras)
    out = q.new_empty(*q.shape[:2], extras.value_dim or v_pages.shape[-1])
    for group in plan.groups:
        if isinstance(group.queries, slice):
            out[group.queries] = _attend_group(q[group.queries], k_pages, v_pages, group, scale, window, extras)
        else:
            assert group.outputs is not None, "sequences that are not in order need the indices of their outputs"
            padded = _attend_group(q.index_select(0, group.queries), k_pages, v_pages, group, scale, window, extras)
            places, flat = group.outputs
            out.index_copy_(0, flat, padded.index_select(0, places))
    return out


def _attend_group(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, group: _Group, scale: float, window: int | None, extras: Extras
) -> Tensor:
    """q [R * n, H, Dh] of one group -> [R * n, H, Dv]."""
    num_seqs, longest = group.positions.shape
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = k_pages.shape[1:3]
    k = _gathered(k_pages, group, extras.k_scale, q.dtype, "k")
    latent = extras.value_dim is not None
    v = k[..., : extras.value_dim] if latent else _gathered(v_pages, group, extras.v_scale, q.dtype, "v")
    if (
        group.fresh
        and extras.tree is None
        and (window is None or window >= longest)
        and extras.sinks is None
        and extras.softcap is None
    ):
        q = q.view(num_seqs, longest, heads, head_dim).transpose(1, 2)
        k, v = k[:, :, :longest], v[:, :, :longest]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2).reshape(-1, heads, v.shape[-1])
    groups = heads // kv_heads
    q = q.view(num_seqs, longest, heads, head_dim)
    block = max(1, _MASK_VALUES // (num_seqs * groups * k.shape[2]))
    if block >= longest:
        mask = group.mask(page_size, window, groups, q.dtype, sink_tokens=extras.sink_tokens, tree=extras.tree)
        return _attend_masked(q, k, v, mask, scale, extras).reshape(-1, heads, v.shape[-1])
    out = q.new_empty(num_seqs, longest, heads, v.shape[-1])
    for start in range(0, longest, block):
        part = slice(start, start + block)
        mask = group.mask(page_size, window, groups, q.dtype, part, extras.sink_tokens, extras.tree)
        out[:, part] = _attend_masked(q[:, part], k, v, mask, scale, extras)
    return out.view(-1, heads, v.shape[-1])


def _gathered(pages: Tensor, group: _Group, scale: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
    """[R, KV, L, D] of a group's sequences, scaled if pages are quantized (scale [num_pages, KV, page_size]).

    The layers of a step share one buffer each for keys and values: mapping new memory takes longer than the copy. It is
    valid until the next call for `name`.
    """
    kv_heads, page_size, width = pages.shape[1:]
    index, flat = group.gather_index(kv_heads), pages.view(-1, page_size * width)
    key = (name, kv_heads, page_size, width, pages.dtype)
    if key not in group.memo:
        group.memo[key] = flat.new_empty(len(index), page_size * width)
    rows = torch.index_select(flat, 0, index, out=group.memo[key]).view(len(group.table), kv_heads, -1, width)
    if scale is None:
        return rows.to(dtype)
    if scale.stride(0) == scale.stride(2) == 0:  # one for each head, whatever its page
        scales = scale[0, :, :1, None]
    else:
        scales = scale.reshape(-1, page_size).index_select(0, index).view(len(group.table), kv_heads, -1, 1)
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.to(wide) * scales).to(dtype)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, extras: Extras) -> Tensor:
    """q [R, n, H, Dh], k and v [R, KV, L, D], mask [R, 1, n * G, L] (or [R, 1, 1, L]) -> [R, n, H, Dv].

    The G query heads of a KV head are computed as G queries, so that keys are never repeated.
    """
    num_seqs, longest, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    q = q.reshape(num_seqs, longest, kv_heads, groups, head_dim).transpose(1, 2)
    q = q.reshape(num_seqs, kv_heads, longest * groups, head_dim)
    if extras.softcap is not None:
        exact = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(exact) @ k.to(exact).transpose(-2, -1)).mul_(scale / extras.softcap).tanh_()
        out = (scores.mul_(extras.softcap).add_(mask).softmax(-1) @ v.to(exact)).to(q.dtype)
    elif extras.sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    else:
        scores = q @ k.transpose(-2, -1) * scale + mask
        sink = extras.sinks.to(q.dtype).view(kv_heads, 1, groups).expand(num_seqs, kv_heads, longest, groups)
        out = torch.cat((scores, sink.reshape(num_seqs, kv_heads, -1, 1)), dim=-1).softmax(-1)[..., :-1] @ v
    return (
        out.view(num_seqs, kv_heads, longest, groups, v.shape[-1])
        .transpose(1, 2)
        .reshape(num_seqs, longest, heads, v.shape[-1])
    )


def _similar(query_lens: Sequence[int], seq_lens: Sequence[int], pages: Sequence[int]) -> list[list[int]]:
    """Groups of sequences whose padded size is little above their true size; each in ascending order."""
    fresh = [n > 1 and n == total for n, total in zip(query_lens, seq_lens)]
    order = sorted(range(len(pages)), key=lambda seq: (query_lens[seq] > 1, fresh[seq], pages[seq], query_lens[seq]))
    groups: list[list[int]] = []
    kind: tuple[bool, bool] | None = None
    true = longest = widest = 0
    for seq in order:
        size = query_lens[seq] * pages[seq]
        more_long, more_wide = max(longest, query_lens[seq]), max(widest, pages[seq])
        same = kind == (query_lens[seq] > 1, fresh[seq])
        if same and (len(groups[-1]) + 1) * more_long * more_wide <= 1.5 * (true + size) + _FREE_SLOTS / 16:
            groups[-1].append(seq)
            true, longest, widest = true + size, more_long, more_wide
        else:
            groups.append([seq])
            kind = (query_lens[seq] > 1, fresh[seq])
            true, longest, widest = size, query_lens[seq], pages[seq]
    return [sorted(group) for group in groups]


def _to(values: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
