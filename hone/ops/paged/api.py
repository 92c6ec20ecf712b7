"""Attention over a paged cache: write new keys and values into pages, attend through a page table.

Kwon et al. 2023, arXiv:2309.06180. Sequences with any number of new tokens each are flat, one after another. Pages may hold
8-bit numbers with scales: per token and head (`write_kv` computes them, so that nothing written is ever rounded again), or
fixed beforehand per page and head, or per head.

Legend: T flat new tokens, R sequences, P pages of a sequence (padded), H query heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.formats import LARGEST
from hone.ops.paged.reference import Extras, PagedPlan, attend_planned, plan_sequences

__all__ = [
    "PagedPlan",
    "attend_latent",
    "attend_paged",
    "attend_planned",
    "per_token",
    "plan_sequences",
    "quantize_kv",
    "runs_kernel",
    "write_kv",
]


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes k, v [T, KV, Dh] into k_pages, v_pages [num_pages, KV, page_size, Dh]: token t at offsets[t] of pages[t].

    `pages` and `offsets` are int64 [T] on the pages' device; no slot may occur twice. Pages of 8-bit numbers need
    `k_scale` and `v_scale`: [num_pages, KV, page_size] are filled in, [num_pages, KV] and [KV] are read only (values
    out of their range are clamped). Raises SpecError for shapes, dtypes and scales that do not fit together.
    """
    check_write(k, v, k_pages, v_pages, pages, offsets, k_scale, v_scale)
    for x, into, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scale is not None and scale.dim() == 3:
            x, scale[pages, :, offsets] = quantize_kv(x, into.dtype)
        elif scale is not None:
            x = _rounded(x.float() / (scale[pages] if scale.dim() == 2 else scale)[..., None], into.dtype)
        into[pages, :, offsets] = x


def check_write(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raises SpecError for arguments that `write_kv` does not support."""
    for name, x, into, scale in (("k", k, k_pages, k_scale), ("v", v, v_pages, v_scale)):
        if x.dim() != 3 or into.dim() != 4 or x.shape[1] != into.shape[1] or x.shape[2] != into.shape[3]:
            raise SpecError(
                f"{name} {tuple(x.shape)} and {name}_pages {tuple(into.shape)} do not fit together",
                fix="k and v are [T, KV, Dh], pages [num_pages, KV, page_size, Dh]",
            )
        if (into.dtype in LARGEST) != (scale is not None):
            raise SpecError(
                f"{name}_pages of {into.dtype} were given {'without' if scale is None else 'with'} {name}_scale",
                fix="8-bit pages need both k_scale and v_scale, others neither",
            )
    if not len(k) == len(v) == len(pages) == len(offsets):
        raise SpecError(
            f"{len(k)} keys and {len(v)} values were given with {len(pages)} pages and {len(offsets)} offsets",
            fix="give one page and one offset per token",
        )


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., Dh] in `dtype` (float8_e4m3fn or int8), and its scales [...], float32, with x approximately their product."""
    if dtype not in LARGEST:
        raise SpecError(f"pages are quantized to {dtype}", fix=f"use one of {', '.join(map(str, LARGEST))}")
    scale = (x.abs().amax(-1).float() / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    return _rounded(x.float() / scale[..., None], dtype), scale


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return x.round().clamp(-LARGEST[dtype] - 1, LARGEST[dtype]).to(dtype)


def attend_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_query_len: int | None = None,
    tree: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of the last `query_lens[r]` tokens of each sequence r to all its `seq_lens[r]` tokens.

    q [T, H, Dh], sequences one after another, T the sum of `query_lens` (1 each when None); pages
    [num_pages, KV, page_size, Dh] (values may have another width); page_table integer [R, P], padded with any page;
    seq_lens [R] includes the new tokens. With `window` w a token attends to itself, the w - 1 before it, and the first
    `sink_tokens` of its sequence (Xiao et al. 2023, arXiv:2309.17453). `sinks` [H] float32 are learned scores without a
    value in the softmax. 8-bit pages need `k_scale` and `v_scale`: [num_pages, KV, page_size], [num_pages, KV] or [KV],
    float32. Returns [T, H, Dv].

    With `tree` int64 [N], on q's device, the new tokens of a sequence, N or none, are a tree: token i attends to what was there before
    them, and to the new token j where bit j of tree[i] is set (N is `max_query_len`, and N * H / KV at most 64).

    On a GPU the host never waits for the lengths: one captured CUDA graph serves all of them. With `max_query_len`, which
    no query length may exceed, the kernel for many new tokens per sequence may be skipped. The reference reads slots past
    the end of a sequence with weight 0, so they must hold finite numbers; the kernels do not read them. Raises SpecError
    for shapes, dtypes and options that do not fit together; only the reference checks lengths and page numbers, because
    reading them would make the host wait for a GPU. No gradient.
    """
    extras = Extras(sink_tokens, sinks, per_token(k_scale, k_pages), per_token(v_scale, v_pages), tree=tree)
    _check(q, k_pages, v_pages, page_table, seq_lens, query_lens, extras)
    _check_options(scale, window, sink_tokens)
    _check_tree(q, k_pages, query_lens, window, max_query_len, extras)
    plain = query_lens is None and not sink_tokens and sinks is None and k_scale is None
    chosen = _backend(
        q, k_pages, v_pages, len(seq_lens), backend, **({"decode": plain} if q.device.type == "cpu" else {})
    )
    if chosen == "compiled":
        from hone.ops.paged.cpu_attend import attend_decode

        return attend_decode(q, k_pages, v_pages, page_table, seq_lens, scale, window)
    if chosen == "triton":
        from hone.ops.paged import triton_launch as paged_launch

        run = paged_launch.attend_pages_op if torch.compiler.is_compiling() else paged_launch.attend_pages
        q = q if q.stride(-1) == 1 else q.contiguous()
        return run(
            q, k_pages, v_pages, page_table, seq_lens, query_lens, scale, window, sink_tokens, sinks,
            extras.k_scale, extras.v_scale, max_query_len, tree
        )  # fmt: skip
    plan = _planned(q, page_table, seq_lens, query_lens, k_pages.shape[2])
    return attend_planned(q, k_pages, v_pages, plan, scale=scale, window=window, extras=extras)


def _check_tree(
    q: Tensor, k_pages: Tensor, query_lens: Tensor | None, window: int | None, max_query_len: int | None, extras: Extras
) -> None:
    """Raises SpecError for a tree that no kernel covers."""
    tree = extras.tree
    if tree is None:
        return
    if query_lens is None or max_query_len != len(tree) or tree.dtype != torch.int64 or tree.dim() != 1:
        raise SpecError(
            f"tree is {tree.dtype} {tuple(tree.shape)}, and max_query_len is {max_query_len}",
            fix="give int64 [max_query_len], and query_lens of that many tokens or none",
        )
    if len(tree) * (q.shape[1] // k_pages.shape[1]) > 64:
        raise SpecError(
            f"a tree of {len(tree)} tokens has more than 64 queries of a key/value head", fix="give a smaller tree"
        )
    if window is not None or extras.sink_tokens or extras.k_scale is not None:
        raise SpecError(
            "a tree was given with a window, sink_tokens or pages of 8 bits",
            fix="give new tokens that follow one another",
        )


def runs_kernel(q: Tensor, k_pages: Tensor, v_pages: Tensor, num_rows: int, **options: Any) -> bool:
    """Whether `attend_paged` runs a kernel, which reads lengths and pages on the device. Else call `plan_sequences` once per step
    and `attend_planned` in every layer. `options`: further options of the dispatch rule (softcap=True)."""
    return _backend(q, k_pages, v_pages, num_rows, None, **options) == "triton"


def _backend(q: Tensor, k_pages: Tensor, v_pages: Tensor, num_rows: int, forced: str | None, **options: Any) -> str:
    return backend_of(
        "attend_paged",
        q.device,
        forced,
        dtype=q.dtype,
        page_dtype=k_pages.dtype,
        head_dim=k_pages.shape[3],
        v_dim=v_pages.shape[3],
        rows=num_rows,
        **options,
    )


def attend_latent(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None = None,
    *,
    value_dim: int,
    scale: float,
    window: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`attend_paged` where all heads share one latent per token: pages [num_pages, page_size, D], values its first columns.

    DeepSeek-AI 2024 (multi-head latent attention, arXiv:2405.04434), absorbed form: q [T, H, D] is already projected
    onto the latent (its first `value_dim` columns) and the shared rotated key (the rest). Returns [T, H, value_dim].
    The kernel reads the latents once for all heads; made for decoding, it treats every new token as one sequence.
    Raises SpecError as `attend_paged` does. No gradient.
    """
    if q.dim() != 3 or pages.dim() != 3 or q.shape[2] != pages.shape[2] or not 0 < value_dim < pages.shape[2]:
        raise SpecError(
            f"q {tuple(q.shape)}, pages {tuple(pages.shape)} and value_dim {value_dim} do not fit together",
            fix="q is [T, H, D], pages [num_pages, page_size, D], value_dim below D",
        )
    _check_seqs(q, page_table, seq_lens, query_lens)
    _check_options(scale, window, 0)
    keys = pages.unsqueeze(1)
    rope_dim = pages.shape[2] - value_dim
    case = {"dtype": q.dtype, "page_dtype": pages.dtype, "heads": q.shape[1], "value_dim": value_dim}
    boxed = window is None and pages.shape[1] % 64 == 0 and _aligned(pages)
    chosen = backend_of("attend_latent", q.device, backend, **case, rope_dim=rope_dim, rows=len(q), boxed=boxed)
    if chosen in ("triton", "gluon"):
        from hone.ops.paged import triton_launch as paged_launch

        run = paged_launch.attend_latents_op if torch.compiler.is_compiling() else paged_launch.attend_latents
        q = q if _aligned(q) else q.contiguous()
        return run(q, keys, page_table, seq_lens, query_lens, value_dim, scale, window, chosen == "gluon")
    plan = _planned(q, page_table, seq_lens, query_lens, pages.shape[1])
    return attend_planned(q, keys, keys, plan, scale=scale, window=window, extras=Extras(value_dim=value_dim))


def _aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and 16-byte aligned."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(start * x.element_size() % 16 == 0 for start in starts)


def _planned(q: Tensor, page_table: Tensor, seq_lens: Tensor, query_lens: Tensor | None, page_size: int) -> PagedPlan:
    """The plan of `attend_planned`. Raises SpecError for lengths that contradict each other."""
    lengths = [1] * len(seq_lens) if query_lens is None else query_lens.tolist()
    totals = seq_lens.tolist()
    if sum(lengths) != len(q):
        raise SpecError(f"query_lens add up to {sum(lengths)}, q has {len(q)} tokens", fix="give q as many tokens")
    for seq, (count, total) in enumerate(zip(lengths, totals)):
        if not 0 <= count <= total <= page_table.shape[1] * page_size:
            raise SpecError(
                f"sequence {seq} has {count} new tokens of {total}, and {page_table.shape[1]} pages of {page_size}",
                fix="give seq_lens that include the new tokens, and pages for all of them",
            )
    return plan_sequences(page_table.cpu().numpy(), totals, lengths, page_size, q.device)


def per_token(scale: Tensor | None, pages: Tensor) -> Tensor | None:
    """Scales of any of the three shapes as [num_pages, KV, page_size], without a copy."""
    if scale is None:
        return None
    whole = pages.shape[:3]
    try:
        return (scale[:, None] if scale.dim() == 1 else scale[..., None] if scale.dim() == 2 else scale).expand(whole)
    except RuntimeError:
        raise SpecError(
            f"scales {tuple(scale.shape)} do not fit pages {tuple(pages.shape)}",
            fix=f"give scales {tuple(whole)}, {tuple(whole[:2])} or {tuple(whole[1:2])}",
        ) from None


def _check_options(scale: float, window: int | None, sink_tokens: int) -> None:
    if window is not None and window < 1:
        raise SpecError(f"a window of {window} tokens keeps no key", fix="give at least 1, the query's own, or None")
    if sink_tokens < 0:
        raise SpecError(f"sink_tokens is {sink_tokens}", fix="give the number of first tokens to keep, or 0")
    if not scale > 0:
        raise SpecError(
            f"scale is {scale}", fix="give a scale above 0: the kernels compute the highest score before scaling"
        )


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    extras: Extras,
) -> None:
    """Raises SpecError for shapes and dtypes that do not fit together."""
    shapes = f"q {tuple(q.shape)}, k_pages {tuple(k_pages.shape)}, v_pages {tuple(v_pages.shape)}"
    if q.dim() != 3 or k_pages.dim() != 4 or v_pages.shape[:3] != k_pages.shape[:3] or q.shape[2] != k_pages.shape[3]:
        raise SpecError(f"{shapes} do not fit together", fix="q is [T, H, Dh], pages [num_pages, KV, page_size, Dh]")
    if not all(k_pages.shape[1:]) or not v_pages.shape[3]:
        raise SpecError(f"{shapes}: pages without heads, slots or width", fix="give pages of at least one of each")
    if q.shape[1] % k_pages.shape[1]:
        raise SpecError(
            f"{q.shape[1]} query heads are no multiple of {k_pages.shape[1]} key/value heads",
            fix="give a multiple of the key/value heads: consecutive query heads share one",
        )
    if extras.sinks is not None and extras.sinks.shape != q.shape[1:2]:
        raise SpecError(f"sinks {tuple(extras.sinks.shape)} are not [{q.shape[1]}]", fix="give one per query head")
    _check_seqs(q, page_table, seq_lens, query_lens)
    if (k_pages.dtype in LARGEST) != (extras.k_scale is not None) or (extras.k_scale is None) != (
        extras.v_scale is None
    ):
        raise SpecError(
            f"pages of {k_pages.dtype} were given {'without' if extras.k_scale is None else 'with'} scales",
            fix="8-bit pages need both k_scale and v_scale, others neither",
        )


def _check_seqs(q: Tensor, page_table: Tensor, seq_lens: Tensor, query_lens: Tensor | None) -> None:
    lens = seq_lens if query_lens is None else query_lens
    fits = page_table.dim() == 2 and seq_lens.dim() == lens.dim() == 1 and len(page_table) == len(seq_lens) == len(lens)
    if not fits or (query_lens is None and len(q) != len(seq_lens)):
        raise SpecError(
            f"page_table {tuple(page_table.shape)}, seq_lens {tuple(seq_lens.shape)} and query_lens have different numbers of sequences",
            fix="give one entry per sequence in each; without query_lens one token per sequence in q",
        )
