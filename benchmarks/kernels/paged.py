"""Attention over pages: decoding in bf16 and 8 bits against the read ceiling, latents, chunked prefill.

Bytes are those of the true lengths' keys and values, once. Where a few hundred megabytes would stay in the L2 cache between
replays, several page pools take turns. The peer keeps its keys contiguous: torch has no attention over pages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import attend_latent, attend_paged

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
DECODE = ((1, 32768, 0.70), (64, 4096, 0.88), (256, 1536, 0.88))
POOLS_BELOW = 400 << 20


def pools(
    rows: int, length: int, kv_heads: int, widths: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[list[Tensor], Tensor]]:
    """Page pools of random numbers, each with a shuffled page table: so many that they do not fit the L2 cache."""
    per_row = -(-length // PAGE_SIZE)
    shape = (rows * per_row, kv_heads, PAGE_SIZE)
    num_bytes = rows * length * kv_heads * sum(widths) * dtype.itemsize
    made = []
    for _ in range(1 + POOLS_BELOW // num_bytes):
        pages = [torch.randn(*shape, width, device="cuda", dtype=torch.bfloat16).to(dtype) for width in widths]
        table = torch.randperm(rows * per_row, device="cuda").view(rows, per_row).int()
        made.append((pages, table))
    return made


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = []
    for count, length, of_target in DECODE:
        found += decode_rows(limit, count, length, of_target)
        torch.cuda.empty_cache()
    found += [ragged_row(limit, heads, page_size) for heads in (16, 32) for page_size in (16, 64, 128)]
    torch.cuda.empty_cache()
    found += [latent_row(limit, 64, 4096, heads) for heads in (16, 64, 128)]
    prompts = ((4, 2048, 8192), (2, 4096, 4096), (1, 8192, 16384), (16, 512, 512))
    found += [prefill_row(limit, *sizes) for sizes in prompts]
    return found


def decode_rows(limit: Ceilings, count: int, length: int, of_target: float) -> list[dict[str, Any]]:
    """bf16 against SDPA on contiguous keys, then fp8 and int8 pages against bf16 ones.

    8 bits are meant to pay in full from 256 MB of bf16 keys and values on: launches and the first loads take 10 us.
    """
    q = torch.randn(count, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((count,), length, device="cuda", dtype=torch.int32)
    scale = HEAD_DIM**-0.5
    seconds: dict[str, float] = {}
    runs, calls = {}, 0
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        made = pools(count, length, KV_HEADS, (HEAD_DIM, HEAD_DIM), dtype)
        scales = {}
        if dtype is not torch.bfloat16:
            scales = {name: torch.rand(made[0][0][0].shape[:3], device="cuda") for name in ("k_scale", "v_scale")}
        made = made[: calls or len(made)]
        calls = len(made)

        def run(made=made, scales=scales):
            for (k, v), table in made:
                attend_paged(q, k, v, table, lens, scale=scale, **scales)

        runs[str(dtype).removeprefix("torch.")] = run
    k, v = torch.randn(2, count, KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def peer():
        for _ in range(calls):
            F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)

    names = [*runs, "peer"]
    seconds = dict(zip(names, interleaved([*runs.values(), peer], calls=calls), strict=True))
    numbers = 2 * count * length * KV_HEADS * HEAD_DIM
    name = f"paged decode {count} x {length}, GQA {HEADS}/{KV_HEADS} d{HEAD_DIM}"
    common = {"unit": "TB/s", "ceiling": limit.read}
    found = [
        row(f"{name} bf16", seconds["bfloat16"], amount=2 * numbers, peer="SDPA, contiguous keys",
            peer_seconds=seconds["peer"], of_target=of_target, **common)
    ]  # fmt: skip
    for dtype in ("float8_e4m3fn", "int8"):
        found.append(
            row(f"{name} {dtype}", seconds[dtype], amount=numbers, peer="bf16 pages", peer_seconds=seconds["bfloat16"],
                target=1.7 if dtype == "float8_e4m3fn" else None, **common)
        )  # fmt: skip
    return found


def ragged_row(limit: Ceilings, heads: int, page_size: int) -> dict[str, Any]:
    """512 sequences of 100 ... 1324 tokens, as a loaded server has them, in shuffled pages."""
    count, generator = 512, torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 1325, (count,), generator=generator)
    needed = -(-lengths // page_size)
    order = torch.randperm(int(needed.sum()), generator=generator).int()
    table = torch.zeros(count, int(needed.max()), dtype=torch.int32)
    for place, (end, many) in enumerate(zip(needed.cumsum(0).tolist(), needed.tolist(), strict=True)):
        table[place, :many] = order[end - many : end]
    q = torch.randn(count, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, len(order), KV_HEADS, page_size, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    table, lens = table.cuda(), lengths.int().cuda()
    (seconds,) = interleaved([lambda: attend_paged(q, k, v, table, lens, scale=HEAD_DIM**-0.5)], calls=1)
    amount = int(lengths.sum()) * KV_HEADS * HEAD_DIM * 4
    name = f"paged decode {count} x 100 ... 1324, GQA {heads}/{KV_HEADS}, pages of {page_size}"
    return row(name, seconds, amount=amount, unit="TB/s", ceiling=limit.read)


def latent_row(limit: Ceilings, count: int, length: int, heads: int) -> dict[str, Any]:
    """MLA decode: of the read ceiling for few heads, of the GEMM ceiling for many (FLOPs: 2 * 1088 per head and token)."""
    q = torch.randn(count, heads, 576, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((count,), length, device="cuda", dtype=torch.int32)
    made = pools(count, length, 1, (576,), torch.bfloat16)

    def run():
        for (pages,), table in made:
            attend_latent(q, pages[:, 0], table, lens, value_dim=512, scale=576**-0.5)

    (seconds,) = interleaved([run], calls=len(made))
    name = f"paged latent decode {count} x {length}, {heads} heads of 512 + 64"
    if heads < 64:
        return row(name, seconds, amount=count * length * 576 * 2, unit="TB/s", ceiling=limit.read)
    flops = 2 * count * length * heads * (576 + 512)
    return row(name, seconds, amount=flops, unit="TFLOP/s", ceiling=limit.gemm)


def prefill_row(limit: Ceilings, count: int, chunk: int, length: int) -> dict[str, Any]:
    """The last `chunk` tokens of `count` sequences of `length`; the peer has contiguous keys, causal from the lower right."""
    from torch.nn.attention.bias import causal_lower_right

    ((k_pages, v_pages), table), *_ = pools(count, length, KV_HEADS, (HEAD_DIM, HEAD_DIM), torch.bfloat16)
    q = torch.randn(count * chunk, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lens, counts = (torch.full((count,), n, device="cuda", dtype=torch.int32) for n in (length, chunk))
    k, v = torch.randn(2, count, KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    contiguous, bias = q.view(count, chunk, HEADS, HEAD_DIM).transpose(1, 2), causal_lower_right(chunk, length)
    seconds, peer = interleaved(
        [
            lambda: attend_paged(q, k_pages, v_pages, table, lens, counts, scale=0.1),
            lambda: F.scaled_dot_product_attention(contiguous, k, v, bias, scale=0.1, enable_gqa=True),
        ]
    )
    pairs = count * HEADS * (chunk * (length - chunk) + chunk * (chunk + 1) / 2)
    return row(f"paged prefill {count} x {chunk} of {length}, GQA {HEADS}/{KV_HEADS} d{HEAD_DIM} bf16", seconds,
               amount=4 * HEAD_DIM * pairs, unit="TFLOP/s", ceiling=limit.gemm, peer="SDPA, contiguous keys",
               peer_seconds=peer)  # fmt: skip
