"""The linear head's loss, few-token experts, norm, gate, rotation and sampling against torch and torch.compile.

Bytes are those an op must move: its inputs and outputs once. Rows of decode size fit in the L2 cache and are bound by a
launch, so they have no share of a ceiling to reach. A step is a forward and a backward pass; its launches are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import (
    grouped_linear,
    linear_cross_entropy,
    permute,
    rms_norm,
    rope,
    rope_write,
    sample,
    swiglu,
    unpermute,
)
from hone.ops.sample.noise import noise_keys

BF16 = {"device": "cuda", "dtype": torch.bfloat16}

compiled = partial(torch.compile, dynamic=False)
"""The peer at its best: each shape gets code of its own."""


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = loss_rows(limit)
    for experts, out, width in ((128, 1536, 2048), (128, 2048, 768), (64, 2816, 2048)):
        found += [expert_row(limit, experts, out, width, each) for each in (1, 4, 16)]
    for tokens in (16384, 64):
        found += norm_rows(limit, tokens, 4096) + gate_rows(limit, tokens, 14336) + [rope_row(limit, tokens)]
        torch.cuda.empty_cache()
    found += norm_rows(limit, 16384, 8192)
    found += permute_rows(limit, 8192, 8, 128, 2048)
    found += sample_rows(limit, 1, 128256) + sample_rows(limit, 64, 128256)
    found.append(adamw_row(limit))
    return found


def loss_rows(limit: Ceilings) -> list[dict[str, Any]]:
    """Time and memory of cross entropy over a head of Llama 3's size, forward and backward."""
    tokens, width, vocab = 8192, 4096, 128256
    x = torch.randn(tokens, width, **BF16).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    plain = compiled(lambda x, weight, targets: F.cross_entropy(F.linear(x, weight).float(), targets))

    def step(loss: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = weight.grad = None
            loss(x, weight, targets).backward()

        return run

    runs = [step(linear_cross_entropy), step(plain)]
    grown = [_peak_bytes(run, x, weight) / 2**20 for run in runs]
    ours, theirs = interleaved(runs, captured=False, min_time_s=1.0)
    x.grad = weight.grad = None
    name = f"linear_cross_entropy {tokens} x {width} x {vocab}, step"
    memory = {
        "figure": f"{name}: peak beyond inputs and gradients",
        "value": grown[0],
        "unit": "MiB",
        "peer": "torch.compile",
        "peer_value": grown[1],
        "ratio": grown[1] / grown[0],
        "target": 8.0,
    }
    flop = 6 * tokens * width * vocab
    return [
        row(
            name, ours, amount=flop, unit="TFLOP/s", ceiling=limit.gemm,
            peer="torch.compile", peer_seconds=theirs, target=1.2,
        ),
        memory,
    ]  # fmt: skip


def _peak_bytes(run: Callable[[], None], *leaves: Tensor) -> int:
    run()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def expert_row(limit: Ceilings, experts: int, out: int, width: int, each: int) -> dict[str, Any]:
    """The product of a decoding step's tokens with their experts' weights; two sets of weights take turns."""
    weights = [torch.randn(experts, out, width, **BF16) for _ in range(2)]
    x = torch.randn(experts * each, width, **BF16)
    ends = (torch.arange(experts, device="cuda") + 1).int() * each
    ours, theirs = interleaved(
        [
            lambda: [grouped_linear(x, weight, ends) for weight in weights],
            lambda: [F.grouped_mm(x, weight.mT, offs=ends) for weight in weights],
        ],
        calls=2,
    )
    return row(
        f"grouped_linear {experts} experts of {out} x {width}, {each} tokens each", ours,
        amount=2 * weights[0].numel(), unit="TB/s", ceiling=limit.read, peer="torch grouped_mm", peer_seconds=theirs,
        target=3, of_target=0.6,
    )  # fmt: skip


def against_compile(
    limit: Ceilings,
    figure: str,
    num_bytes: int,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    large: bool,
    captured: bool = True,
) -> dict[str, Any]:
    one, two = interleaved([ours, theirs], captured=captured)
    share = {"of_target": 0.85} if large else {}
    return row(
        figure, one, amount=num_bytes, unit="TB/s", ceiling=limit.copy, peer="torch.compile", peer_seconds=two,
        target=1.0, **share,
    )  # fmt: skip


def step(op: Callable[..., Any], inputs: Sequence[Tensor], flows: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward in one call."""
    leaves = [one.detach().requires_grad_() for one in inputs]

    def run() -> Any:
        out = op(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(out, leaves, flows[: len(out)])

    return run


def norm_rows(limit: Ceilings, tokens: int, width: int) -> list[dict[str, Any]]:
    """rms_norm with its residual: two reads, two writes; the backward pass three reads, one write."""
    x, residual, flow, flow_sum = torch.randn(4, tokens, width, **BF16).unbind()
    weight = torch.rand(width, **BF16)

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, 1e-5, residual)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x + residual, weight, 1e-5, backend="reference"), x + residual

    theirs, given, large = compiled(plain), (x, residual, weight), tokens > 1024
    name = f"rms_norm + residual {tokens} x {width}"
    flows = (flow, flow_sum)
    found = [
        against_compile(limit, name, 8 * x.numel(), lambda: ours(*given), lambda: theirs(*given), large),
    ]
    if large:
        runs = step(ours, given, flows), step(theirs, given, flows)
        found.append(against_compile(limit, f"{name}, step", 16 * x.numel(), *runs, False, captured=False))
    return found


def gate_rows(limit: Ceilings, tokens: int, width: int) -> list[dict[str, Any]]:
    """swiglu: 3 values moved an output, 5 more in the backward pass."""
    gate_up, flow = torch.randn(tokens, 2 * width, **BF16), torch.randn(tokens, width, **BF16)
    theirs, large = compiled(partial(swiglu, backend="reference")), tokens > 1024
    name = f"swiglu {tokens} x 2 x {width}"
    found = [against_compile(limit, name, 6 * flow.numel(), lambda: swiglu(gate_up), lambda: theirs(gate_up), large)]
    if large:
        runs = step(swiglu, (gate_up,), (flow,)), step(theirs, (gate_up,), (flow,))
        found.append(against_compile(limit, f"{name}, step", 16 * flow.numel(), *runs, False, captured=False))
    return found


def rope_row(limit: Ceilings, tokens: int) -> dict[str, Any]:
    """Queries turned in place, keys turned and filed with values in pages; the peer gives new queries."""
    heads, kv_heads, head_dim, page_size = 32, 8, 128, 64
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, **BF16)
    turn = torch.randn(tokens, 1, head_dim // 2, device="cuda")
    cos, sin = turn.cos().bfloat16(), turn.sin().bfloat16()
    slots = torch.arange(tokens, device="cuda") + 40
    places = slots // page_size, slots % page_size
    k_pages, v_pages = torch.zeros(2, tokens // page_size + 2, kv_heads, page_size, head_dim, **BF16)

    @compiled
    def theirs(qkv: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        k_pages[pages, :, offsets] = rope(k, cos, sin, backend="reference")
        v_pages[pages, :, offsets] = v
        return rope(q, cos, sin, backend="reference")

    return against_compile(
        limit, f"rope + KV write {tokens} tokens, {heads}/{kv_heads} d{head_dim}", 4 * qkv.numel(),
        lambda: rope_write(*qkv.split([heads, kv_heads, kv_heads], 1), cos, sin, k_pages, v_pages, *places),
        lambda: theirs(qkv, k_pages, v_pages, *places), tokens > 1024,
    )  # fmt: skip


def permute_rows(limit: Ceilings, tokens: int, top_k: int, experts: int, width: int) -> list[dict[str, Any]]:
    """Rows to their experts and back, against torch's stable sort and gathers."""
    x = torch.randn(tokens, width, **BF16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, **BF16)
    y, _, place = permute(x, ids, experts)
    num_bytes = 2 * (top_k + 1) * x.numel()
    found = []
    runs: dict[str, Callable[[str], Any]] = {
        "permute": lambda backend: permute(x, ids, experts, backend=backend),
        "unpermute": lambda backend: unpermute(y, place, weights, backend=backend),
    }
    for name, run in runs.items():
        ours, theirs = interleaved([partial(run, "triton"), partial(run, "reference")], captured=False)
        found.append(
            row(
                f"{name} {tokens} x {width}, {top_k} of {experts} experts", ours, amount=num_bytes, unit="TB/s",
                ceiling=limit.copy, peer="torch", peer_seconds=theirs,
            )
        )  # fmt: skip
    return found


def sample_rows(limit: Ceilings, count: int, vocab: int) -> list[dict[str, Any]]:
    """A step's draws: noise made where it is added, thresholds without a sort; the peer is the torch reference."""
    logits = torch.randn(count, vocab, device="cuda") * 3
    keys = noise_keys(range(count), range(count), device="cuda")
    heat, share = torch.full((count,), 0.8, device="cuda"), torch.full((count,), 0.9, device="cuda")
    found = []
    for name, options in (("temperature", {}), ("top-p", {"top_p": share})):
        ours, theirs = interleaved(
            [
                lambda backend=backend, options=options: sample(logits, heat, **options, keys=keys, backend=backend)
                for backend in ("triton", "reference")
            ],
            captured=False,
        )
        found.append(
            row(
                f"sample {count} x {vocab}, {name}", ours, amount=4 * logits.numel(), unit="TB/s", ceiling=limit.read,
                peer="torch", peer_seconds=theirs,
            )
        )  # fmt: skip
    return found


def adamw_row(limit: Ceilings) -> dict[str, Any]:
    """torch's fused AdamW, which hone uses: reads weight, gradient and two moments, writes three."""
    weights = [torch.randn(4096, 14336, device="cuda") for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    (seconds,) = interleaved([optimizer.step], captured=False)
    num_bytes = 7 * 4 * sum(weight.numel() for weight in weights)
    return row("adamw (torch's fused)", seconds, amount=num_bytes, unit="TB/s", ceiling=limit.copy, of_target=0.85)
