"""Launches the paged attention kernels as custom torch ops: first decode, then prefill sequences, into one output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hone.ops.dispatch import locate
from hone.ops.paged.triton_decode import combine, decode
from hone.ops.paged.triton_prefill import prefill

_MOST_QUERIES = 64
"""Most queries of one key/value head (tokens times group) of a sequence that the decode kernel computes."""


@dataclass(frozen=True)
class Plan:
    """Tiling of the decode kernel: programs, slots of a block, pipeline stages, warps, and which side of the product is long."""

    programs: int
    block_n: int
    stages: int
    num_warps: int
    swap: bool = False


@dataclass(frozen=True)
class Options:
    """Options of the attention besides its tensors; see `hone.ops.attend_paged`."""

    scale: float
    window: int | None = None
    sink_tokens: int = 0
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    tree: Tensor | None = None


def plan_decode(
    num_sms: int, head_dim: int, page_size: int, itemsize: int, num_seqs: int = 1, queries: int = 1
) -> Plan:
    """The fastest tiling on an H200 (benchmarks/kernels/paged.py): 100 to 200 KiB of stages per multiprocessor.

    `queries` of a sequence share a key/value head. Three programs of two stages read 512 sequences of 200 ... 1400 tokens at
    0.99 of the read rate, two of three stages at 0.96; for a single sequence the latter are faster.
    """
    wide = triton.next_power_of_2(head_dim)
    if itemsize == 1:
        return Plan(4 * num_sms, 64 if wide <= 128 else 32, 3, 2)
    block_n = min(128 if page_size % 128 == 0 else 64, max(16, 8192 // wide))
    large = block_n * wide >= 8192
    if large and itemsize == 2 and num_seqs >= 8 and queries <= 16:
        return Plan(3 * num_sms, block_n, 2, 4)
    return Plan(2 * num_sms, block_n, 3 if large else 5, 4)


def plan_latent(num_sms: int, num_heads: int) -> Plan:
    """As `plan_decode`, for latents of 512 + 64 columns."""
    if num_heads <= 16:
        return Plan(num_sms, 64, 3, 4)
    return Plan(num_sms, 64, 2, 8)


def launch_decode(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    max_tokens: int,
    options: Options,
    plan: Plan,
    rope_dim: int = 0,
) -> None:
    """Writes `out` [T, H, Dv] for the sequences of at most `max_tokens` new tokens; others are not written.

    With `rope_dim` > 0 pages hold latents, their last `rope_dim` columns rotated: see `attend_latent`.
    """
    num_seqs = len(seq_lens)
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    group, value_dim = q.shape[1] // kv_heads, v_pages.shape[3]
    k_strides, v_strides = k_pages.stride(), v_pages.stride()
    if rope_dim:
        # Tiles of at most 64 heads, which read the same latents.
        group = min(group, 64)
        kv_heads, head_dim = q.shape[1] // group, head_dim - rope_dim
        k_strides = v_strides = (k_strides[0], 0, *k_strides[2:])
    block_m = max(16, triton.next_power_of_2(group * max_tokens))
    block_dv = triton.next_power_of_2(value_dim)
    programs = plan.programs
    part = torch.empty(2 * programs * block_m * block_dv, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(2 * programs * block_m, dtype=torch.float32, device=q.device)
    note = torch.empty(programs, 3, dtype=torch.int32, device=q.device)
    many = query_lens is not None
    padded_seqs = max(16, triton.next_power_of_2(num_seqs))
    early = locate(q.device).capability >= (9, 0)  # programmatic dependent launch: `combine` starts early
    sinks = q if options.sinks is None else options.sinks
    tree = seq_lens if options.tree is None else options.tree
    integer = k_pages.dtype == torch.int8
    if options.k_scale is not None:
        k_pages, v_pages = k_pages.view(torch.int32), v_pages.view(torch.int32)
        k_strides, v_strides = k_pages.stride(), v_pages.stride()
    lens = query_lens if many else seq_lens
    decode[(programs,)](
        q, k_pages, v_pages, page_table, seq_lens, lens, *_scales(q, options), sinks, tree, out, part, part_lse, note,
        *q.stride()[:2], *k_strides[:3], *v_strides[:3], page_table.stride(0), *out.stride()[:2],
        *_scale_strides(options), num_seqs, max_tokens, options.scale, options.window or 0, options.sink_tokens,
        KV=kv_heads, GROUP=group, DIM=head_dim, ROPE_DIM=rope_dim, DIM_V=value_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=block_dv, PAGE_SIZE=page_size, SEQS=padded_seqs, BLOCK_M=block_m, BLOCK_N=plan.block_n, STAGES=plan.stages,
        WINDOWED=options.window is not None, MANY=many, SINKS=options.sinks is not None, SWAP=plan.swap,
        INTEGER=integer, TREE=options.tree is not None, EARLY=early, num_warps=plan.num_warps, launch_pdl=early,
    )  # fmt: skip
    combine[(programs, group * max_tokens)](
        part, part_lse, note, lens, sinks, out, *out.stride()[:2],
        GROUP=group, DIM_V=value_dim, BLOCK_DV=block_dv, BLOCK_M=block_m, SEQS=padded_seqs, SPLITS=32, MANY=many,
        SINKS=options.sinks is not None, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


def launch_prefill(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor,
    min_tokens: int,
    options: Options,
    block_m: int | None = None,
    block_n: int = 64,
    stages: int = 3,
    num_warps: int = 8,
) -> None:
    """Writes `out` [T, H, Dv] for the sequences of at least `min_tokens` new tokens; others are not written."""
    num_seqs = len(seq_lens)
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    group, value_dim = q.shape[1] // kv_heads, v_pages.shape[3]
    if block_m is None:
        # 227 KiB of shared memory hold a tile of queries and three blocks of keys and values.
        block_m, block_n, num_warps = (128, 64, 8) if max(head_dim, value_dim) <= 128 else (64, 32, 4)
    block_m = max(block_m, triton.next_power_of_2(group))
    tiles = triton.cdiv(len(q), block_m // group) + min(num_seqs, len(q) // max(1, min_tokens))
    prefill[(tiles, kv_heads)](
        q, k_pages, v_pages, page_table, seq_lens, query_lens, *_scales(q, options),
        q if options.sinks is None else options.sinks, out,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], page_table.stride(0), *out.stride()[:2],
        *_scale_strides(options), num_seqs, min_tokens, options.scale, options.window or 0, options.sink_tokens,
        GROUP=group, DIM=head_dim, DIM_V=value_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=triton.next_power_of_2(value_dim), PAGE_SIZE=page_size, SEQS=max(16, triton.next_power_of_2(num_seqs)),
        BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, WINDOWED=options.window is not None,
        SCALED=options.k_scale is not None, SINKS=options.sinks is not None, num_warps=num_warps,
    )  # fmt: skip


def _scales(q: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    return (q, q) if options.k_scale is None else (options.k_scale, options.v_scale)


def _scale_strides(options: Options) -> tuple[int, ...]:
    return (0,) * 6 if options.k_scale is None else (*options.k_scale.stride(), *options.v_scale.stride())


def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    scale: float,
    window: int | None,
    sink_tokens: int,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int | None,
    tree: Tensor | None = None,
) -> Tensor:
    """`hone.ops.attend_paged`; scales are [num_pages, KV, page_size] of any strides."""
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    page_table, seq_lens = page_table.to(torch.int32).contiguous(), seq_lens.contiguous()
    query_lens = None if query_lens is None else query_lens.contiguous()
    k_pages, v_pages = (pages if pages.stride(-1) == 1 else pages.contiguous() for pages in (k_pages, v_pages))
    sinks = None if sinks is None else sinks.contiguous()
    options = Options(scale, window, sink_tokens, sinks, k_scale, v_scale, tree)
    tensors = (out, q, k_pages, v_pages, page_table, seq_lens, query_lens)
    num_sms = locate(q.device).num_sms
    sizes = (num_sms, k_pages.shape[3], k_pages.shape[2], k_pages.element_size(), len(seq_lens))
    group = q.shape[1] // k_pages.shape[1]
    if query_lens is None:
        launch_decode(*tensors, 1, options, plan_decode(*sizes, group))
    elif max_query_len is not None and group * max_query_len <= _MOST_QUERIES:
        launch_decode(*tensors, max_query_len, options, plan_decode(*sizes, group * max_query_len))
    else:
        few = max(1, 16 // group)
        launch_decode(*tensors, few, options, plan_decode(*sizes, group * few))
        plain = window is None and not sink_tokens and sinks is None and k_scale is None
        if plain and locate(q.device).runs_gluon:
            from hone.ops.paged import gluon_prefill as boxed

            if boxed.fits(q, k_pages, v_pages):
                boxed.launch(*tensors, few + 1, scale, num_sms)
                return out
        launch_prefill(*tensors, few + 1, options)
    return out


def attend_latents(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    value_dim: int,
    scale: float,
    window: int | None,
    hopper: bool,
) -> Tensor:
    """`hone.ops.attend_latent` on pages [num_pages, 1, page_size, D]; `hopper`: by `hone.ops.paged.gluon_latent`."""
    page_table, seq_lens = page_table.to(torch.int32).contiguous(), seq_lens.contiguous()
    pages = pages if pages.stride(-1) == 1 else pages.contiguous()
    if query_lens is not None:
        # Every new token becomes one sequence: the last attends to seq_lens tokens, the one before it to one less.
        ends = query_lens.cumsum(0)
        token = torch.arange(len(q), device=q.device)
        seq = torch.searchsorted(ends, token, right=True)
        seq_lens = (seq_lens[seq] - (ends[seq] - 1 - token)).to(torch.int32)
        page_table = page_table[seq]
    out = q.new_empty(*q.shape[:2], value_dim)
    num_sms = locate(q.device).num_sms
    if hopper:
        from hone.ops.paged import gluon_latent as latent

        latent.launch(out, q, pages[:, 0], page_table, seq_lens, scale, num_sms)
        return out
    plan = plan_latent(num_sms, q.shape[1])
    rope_dim = pages.shape[3] - value_dim
    launch_decode(
        out, q, pages, pages[..., :value_dim], page_table, seq_lens, None, 1, Options(scale, window), plan, rope_dim
    )
    return out


# Custom ops for torch.compile. Eager code calls the functions: an op's dispatch costs as much as a small kernel.

attend_pages_op = torch.library.custom_op("hone::attend_pages", attend_pages, mutates_args=())
attend_latents_op = torch.library.custom_op("hone::attend_latents", attend_latents, mutates_args=())


@attend_pages_op.register_fake
def _(q, k_pages, v_pages, *_):
    return q.new_empty(*q.shape[:2], v_pages.shape[3])


@attend_latents_op.register_fake
def _(q, pages, page_table, seq_lens, query_lens, value_dim, *_):
    return q.new_empty(*q.shape[:2], value_dim)
