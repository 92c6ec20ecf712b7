"""Kernels of a serving step on a GPU: each is checked against its reference, then timed beside the path it replaces.

    python -m benchmarks.kernels.serving_step [section ...]

Every section has a deadline and prints its rows as it ends; a section that fails says why, and the others still run.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import interleaved
from hone.ops import (
    attend_paged,
    attend_shared,
    count_tokens,
    linear,
    penalize,
    rms_norm,
    sample,
    swiglu,
    token_logprobs,
)
from hone.ops.dispatch import locate
from hone.ops.paged import gluon_prefill as boxed
from hone.ops.paged.triton_launch import Options, launch_prefill
from hone.ops.sample.noise import noise_keys

READ, GEMM = 4.14e12, 706e12
"""Bytes/s of a read and FLOP/s of a product of 8192^3 in bf16 on an H200 (docs/ops.md)."""


def main(names: list[str]) -> None:
    """Runs the named sections, or all."""
    for name, (deadline_s, run) in SECTIONS.items():
        if not names or name in names:
            begin = time.perf_counter()
            try:
                with_deadline(run, deadline_s)
            except Exception:
                print(f"{name} FAILED: {traceback.format_exc(limit=-3)}", flush=True)
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - begin:.1f} s", flush=True)


def with_deadline(run: Callable[[], None], deadline_s: int) -> None:
    """Raises TimeoutError in `run` after `deadline_s` seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"after {deadline_s} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(deadline_s)
    try:
        run()
    finally:
        signal.alarm(0)


def show(figure: str, seconds: list[float], *, read: float = 0.0, flop: float = 0.0) -> None:
    """One line: microseconds of hone and of the others, and hone's fraction of the limit."""
    limit = max(read / READ, flop / GEMM)
    rate = (
        f"{read / seconds[0] / 1e12:.2f} TB/s"
        if read / READ >= flop / GEMM
        else f"{flop / seconds[0] / 1e12:.0f} TFLOP/s"
    )
    times = " | ".join(f"{one * 1e6:9.1f}" for one in seconds)
    print(f"{figure:58s} {times} us   {rate:>12s} {100 * limit / seconds[0]:5.1f} %", flush=True)


def same(figure: str, ours: Tensor, theirs: Tensor, most: float) -> None:
    """Says whether two tensors agree: the greatest difference, over the greatest value."""
    worst = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))
    print(f"{'ok   ' if worst <= most else 'WRONG'} {figure}: {worst:.1e} of {most:.0e}", flush=True)


# Sampling.


def sampling() -> None:
    """us: seeds and options on the device | keys given | greedy by torch's max."""
    for count, vocab in ((1, 128_256), (1, 151_936), (64, 128_256), (512, 151_936)):
        logits = torch.randn(count, vocab, device="cuda", dtype=torch.bfloat16) * 3
        share, least = torch.full((count,), 0.9, device="cuda"), torch.full((count,), 0.02, device="cuda")
        most = torch.full((count,), 50, device="cuda", dtype=torch.int32)
        drawing("plain", logits, {})
        drawing("top-k 50", logits, {"top_k": most})
        drawing("top-p 0.9", logits, {"top_p": share})
        drawing("all", logits, {"top_k": most, "top_p": share, "min_p": least})


def drawing(name: str, logits: Tensor, options: dict[str, Tensor]) -> None:
    """One set of filters: as the reference in the first 64 rows, the same alone, times."""
    count, vocab = logits.shape
    seeds = positions = torch.arange(count, device="cuda")
    keys, heat = noise_keys(seeds, positions), torch.full((count,), 0.8, device="cuda")
    few = slice(0, min(count, 64))
    cut, first = ({key: value[part] for key, value in options.items()} for part in (few, slice(0, 1)))
    plain = sample(logits[few], heat[few], **cut, keys=keys[few], backend="reference")
    alone = sample(logits[:1], heat[:1], **first, keys=keys[:1])
    ours = sample(logits, heat, **options, keys=(seeds, positions))
    differ = int((ours[few] != plain).sum())
    verdict = "ok   " if differ <= 1 and alone[0] == ours[0] else "WRONG"
    print(f"{verdict} sample {count} x {vocab} {name}: {differ} of {len(plain)} tokens differ", flush=True)
    runs = [
        lambda: sample(logits, heat, **options, keys=(seeds, positions), peaks=True),
        lambda: sample(logits, heat, **options, keys=keys),
        lambda: logits.max(-1),
    ]
    show(f"sample {count} x {vocab} {name}", interleaved(runs, min_time_s=0.05), read=2.0 * logits.numel())


def tables() -> None:
    """us: hone | torch. Penalties from the table, its update, log-probabilities with 20 alternatives."""
    for count in (1, 512):
        logits = torch.randn(count, 128_256, device="cuda", dtype=torch.bfloat16) * 3
        counts = torch.randint(0, 50, (count, 128_256), device="cuda", dtype=torch.int32) // 49
        rows, options = torch.arange(count, device="cuda"), torch.full((3, count), 1.2, device="cuda")
        tokens = logits.argmax(-1)
        beside(f"penalize {count}", 10.0 * logits.numel(),
               lambda backend, a=(logits, counts, rows, *options): [penalize(*a, backend=backend)])  # fmt: skip
        beside(f"logprobs top 20, {count}", 2.0 * logits.numel(),
               lambda backend, a=(logits, tokens, 20): token_logprobs(*a, backend=backend))  # fmt: skip
        seconds = interleaved([lambda a=(counts, rows, tokens): count_tokens(*a)], min_time_s=0.02)
        show(f"count_tokens {count}", seconds, read=4.0 * count)


def beside(figure: str, num_bytes: float, call: Callable[[str], Sequence[Tensor]]) -> None:
    """An op of two backends: do the first two outputs agree, and how long they take."""
    for ours, plain in zip(call("triton")[:2], call("reference")[:2], strict=True):
        same(figure, ours, plain, 1e-5)
    seconds = interleaved([lambda: call("triton"), lambda: call("reference")], min_time_s=0.05)
    show(figure, seconds, read=num_bytes)


def shared_prefix() -> None:
    """us: shared pages read once | every sequence by itself. 128 sequences, 4096 tokens in common, 64 of their own."""
    for kv_heads, group in ((8, 4), (8, 2)):
        count, prefix, own, page_size, dim = 128, 64, 2, 64, 128
        pages = torch.randn(2, prefix + count * own, kv_heads, page_size, dim, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(count, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
        every = torch.arange(prefix + count * own, device="cuda", dtype=torch.int32)
        table = torch.cat((every[:prefix].expand(count, -1), every[prefix:].view(count, own)), 1)
        lens = torch.full((count,), (prefix + 1) * page_size, device="cuda", dtype=torch.int32)
        shared = torch.tensor([0, count, prefix], device="cuda", dtype=torch.int32)
        args, scale = (q, *pages, table, lens), dim**-0.5
        name = f"decode {count} x {prefix * page_size} shared + {page_size}, GQA {kv_heads * group}/{kv_heads}"
        ours, plain = attend_shared(*args, shared, scale=scale), attend_paged(*args, scale=scale)
        same(name, ours, plain, 2e-2)
        runs = [lambda a=args, s=shared: attend_shared(*a, s, scale=a[0].shape[2] ** -0.5),
                lambda a=args: attend_paged(*a, scale=a[0].shape[2] ** -0.5)]  # fmt: skip
        tokens = (prefix + count) * page_size
        flop = 4.0 * q.numel() * (prefix + 1) * page_size
        show(name, interleaved(runs, min_time_s=0.05), read=4.0 * tokens * kv_heads * dim, flop=flop)
        shared.zero_()
        show(f"{name}, nothing shared", interleaved(runs, min_time_s=0.05), read=4.0 * count * 65 * 64 * kv_heads * dim)


def chain() -> None:
    """us for one call: the small kernels of a decode step one after another, as a captured graph, by rows."""
    for rows, width, feed in ((1, 1024, 3072), (1, 4096, 14336), (64, 4096, 14336)):
        x, residual = torch.randn(2, rows, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
        up = torch.randn(8, 2 * feed, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
        down = torch.randn(8, width, feed, device="cuda", dtype=torch.bfloat16) * feed**-0.5

        def layers(parts: tuple[Tensor, ...] = (x, residual, weight, up, down)) -> Tensor:
            now, summed, weight, up, down = parts
            for one, other in zip(up, down, strict=True):
                normed, summed = rms_norm(now, weight, 1e-5, summed)
                now = linear(swiglu(linear(normed, one)), other)
            return now

        def plain(parts: tuple[Tensor, ...] = (x, residual, weight, up, down)) -> Tensor:
            now, summed, weight, up, down = parts
            for one, other in zip(up, down, strict=True):
                normed, summed = rms_norm(now, weight, 1e-5, summed, backend="reference")
                now = swiglu(normed @ one.T, backend="reference") @ other.T
            return now

        same(f"feed-forwards {rows} x {width}", layers(), plain(), 5e-2)
        seconds = [one / 8 for one in interleaved([layers, plain], min_time_s=0.05)]
        show(f"norm, gate-up, gate, down: {rows} x {width} x {feed}", seconds, read=6.0 * width * feed)


def heads() -> None:
    """us: hone | torch. The head of a step without prompts: vocabulary by width, over the rows that are drawn from."""
    for vocab, width in ((151_936, 1024), (128_256, 4096)):
        weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
        for rows in (1, 8, 64):
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            runs = [lambda x=x, w=weight: linear(x, w), lambda x=x, w=weight: F.linear(x, w)]
            same(f"head {rows} x {width} x {vocab}", *(run() for run in runs), 2e-2)
            seconds = interleaved(runs, min_time_s=0.05)
            show(f"head {rows} x {width} x {vocab}", seconds, read=2.0 * (weight.numel() + rows * vocab))


def prefill() -> None:
    """us: hone | the Triton kernel of other GPUs and options | torch's attention on contiguous keys. Prompts of a step."""
    prefilled(32, 8, [4096, 4096])
    prefilled(16, 8, [4096, 4096])
    prefilled(32, 8, [8192], 8192)
    prefilled(32, 8, [512] * 16)
    prefilled(32, 8, [100, 1, 700, 1, 33], 300)


def prefilled(heads: int, kv_heads: int, counts: list[int], before: int = 0) -> None:
    """`counts` new tokens of sequences that have `before` tokens already."""
    dim, size = 128, 64
    lens = torch.tensor([before + count for count in counts], device="cuda", dtype=torch.int32)
    given = torch.tensor(counts, device="cuda", dtype=torch.int32)
    width = -(-int(lens.max()) // size)
    pages = torch.randn(2, len(counts) * width, kv_heads, size, dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(len(counts) * width, device="cuda").view(len(counts), width).int()
    q = torch.randn(sum(counts), heads, dim, device="cuda", dtype=torch.bfloat16)
    args, scale, few = (q, *pages, table, lens, given), dim**-0.5, max(1, 16 // (heads // kv_heads)) + 1
    ours, plain, num_sms = torch.zeros_like(q), torch.zeros_like(q), locate(q.device).num_sms
    runs = [
        lambda: boxed.launch(ours, *args, few, scale, num_sms),
        lambda: launch_prefill(plain, *args, few, Options(scale)),
    ]
    for run in runs:
        run()
    name = f"prefill {len(counts)} x {counts[0]} after {before}, GQA {heads}/{kv_heads}"
    same(name, ours, plain, 1e-2)
    if len(set(counts)) == 1 and not before:
        rows = q.view(len(counts), -1, heads, dim).transpose(1, 2)
        keys = torch.randn(2, len(counts), kv_heads, counts[0], dim, device="cuda", dtype=torch.bfloat16)
        runs.append(lambda: F.scaled_dot_product_attention(rows, *keys, is_causal=True, enable_gqa=True))
    flop = sum(4.0 * heads * dim * (count * before + count * (count + 1) / 2) for count in counts)
    show(name, interleaved(runs, min_time_s=0.05), flop=flop)


SECTIONS: dict[str, tuple[int, Callable[[], None]]] = {
    "sampling": (25, sampling),
    "tables": (15, tables),
    "shared_prefix": (15, shared_prefix),
    "chain": (15, chain),
    "heads": (15, heads),
    "prefill": (25, prefill),
}

if __name__ == "__main__":
    main(sys.argv[1:])
