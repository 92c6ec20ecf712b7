"""Products of few and of many tokens per expert, and tokens sorted by expert, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import choose_experts, expert_swiglu, grouped_linear, permute, unpermute
from hone.ops.moe.gluon_grouped import by_rows
from hone.ops.moe.gluon_grouped_sums import by_weights
from hone.ops.moe.local import LocalExperts
from hone.ops.moe.weights import FP8, ExpertWeights

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = []
    for experts, out, width in ((128, 1536, 2048), (128, 2048, 768), (64, 2816, 2048)):
        found += [expert_row(limit, experts, out, width, each) for each in (1, 4, 16)]
    for experts, out, width in ((64, 2816, 2048), (64, 2048, 1408), (128, 1536, 2048), (128, 2048, 768)):
        found += training_rows(experts, out, width, 512)
    found += training_rows(64, 2816, 2048, 512, even=False)
    for kind in ("bf16", "int4", "fp8"):
        found += layer_rows(limit, kind, (1, 8, 64, 256), (128, 8, 2048, 768))
    for kind in ("bf16", "int4"):
        found += layer_rows(limit, kind, (1, 8, 64, 256), (128, 8, 2048, 768), ranks=2)
    found += layer_rows(limit, "mxfp4", (1, 8, 64, 256), (32, 4, 2880, 2880))
    found += prompt_rows(limit, "mxfp4", (512, 1024, 2048, 4096, 8192), (32, 4, 2880, 2880))
    return found + permute_rows(limit, 8192, 8, 128, 2048)


def layer_rows(
    limit: Ceilings, kind: str, batches: tuple[int, ...], sizes: tuple[int, int, int, int], *, ranks: int = 1
) -> list[dict[str, Any]]:
    """A layer of experts in decode steps, the router's choice included, of reading the weights of those that are visited.

    `sizes`: experts, of which a token visits, width, inner width. Two layers alternate. The peer is torch's grouped product with its
    topk, sort and gathers, of dense weights. `ranks`: the layer is the part of one of so many that divide experts whole.
    """
    experts, top_k, width, inner = sizes
    own = experts // ranks
    layers = [(_coded(kind, own, 2 * inner, width), _coded(kind, own, width, inner)) for _ in range(2)]
    slots = torch.arange(experts, device="cuda", dtype=torch.int32).clamp(max=own)[:, None]
    local = LocalExperts(slots, torch.ones_like(slots[:, 0]), own) if ranks > 1 else None
    limited = 7.0 if kind == "mxfp4" else None
    routers = [torch.randn(experts, width, **BF16) / 30 for _ in layers]
    size = sum(one.values.nbytes + (0 if one.scales is None else one.scales.nbytes) for one in layers[0]) / own
    found = []
    for batch in batches:
        xs = [torch.randn(batch, width, **BF16) for _ in layers]

        def ours(xs: list[torch.Tensor] = xs) -> None:
            for x, router, (gate_up, down) in zip(xs, routers, layers):
                ids, shares = choose_experts(x, router, top_k, local=local)
                expert_swiglu(x, ids, shares, gate_up, down, limit=limited, local_share=1 / ranks)

        def theirs(xs: list[torch.Tensor] = xs) -> None:
            for x, router, (gate_up, down) in zip(xs, routers, layers):
                weights, ids = (x.float() @ router.float().T).softmax(-1).topk(top_k, -1)
                flat, order = ids.flatten().sort(stable=True)
                ends = torch.searchsorted(flat, torch.arange(experts, device="cuda"), right=True).int()
                made = F.grouped_mm(x[order // top_k], gate_up.values.mT, offs=ends)
                made = F.grouped_mm(F.silu(made[:, :inner]) * made[:, inner:], down.values.mT, offs=ends)
                made = made * (weights / weights.sum(-1, keepdim=True)).flatten()[order, None].bfloat16()
                torch.zeros_like(x).index_add_(0, order // top_k, made)

        chosen = [choose_experts(x, router, top_k)[0].unique() for x, router in zip(xs, routers)]
        visited = sum(int((one < own).sum()) for one in chosen) / len(layers)
        beside = kind == "bf16" and ranks == 1
        taken = interleaved([ours, theirs] if beside else [ours], calls=len(layers))
        peer = {"peer": "torch grouped_mm", "peer_seconds": taken[1]} if beside else {}
        name = f"layer of {experts} experts of {inner} x {width}, {top_k} a token, {kind}, batch {batch}"
        name += f", the part of one of {ranks} ranks" if ranks > 1 else ""
        found.append(row(name, taken[0], amount=visited * size, unit="TB/s", ceiling=limit.read, **peer))
    return found


def prompt_rows(
    limit: Ceilings, kind: str, batches: tuple[int, ...], sizes: tuple[int, int, int, int]
) -> list[dict[str, Any]]:
    """A layer of experts of codes in prompts, which are widened once for all rows, of the rate of dense products. The peer is hone's
    other way, in which each tile of rows widens them for itself. `sizes` are those of `layer_rows`."""
    experts, top_k, width, inner = sizes
    gate_up, down = _coded(kind, experts, 2 * inner, width), _coded(kind, experts, width, inner)
    router, limited = torch.randn(experts, width, **BF16) / 30, 7.0 if kind == "mxfp4" else None
    found = []
    for batch in batches:
        x = torch.randn(batch, width, **BF16)
        ids, shares = choose_experts(x, router, top_k)

        def layer(backend: str, x: torch.Tensor = x, ids: torch.Tensor = ids, shares: torch.Tensor = shares) -> None:
            expert_swiglu(x, ids, shares, gate_up, down, limit=limited, backend=backend)

        once, each = interleaved([partial(layer, "grouped"), partial(layer, "triton")])
        found.append(
            row(
                f"experts of a layer of {experts} of {inner} x {width}, {top_k} a token, {kind}, {batch} tokens: codes widened once",
                once, amount=2 * batch * top_k * 3 * inner * width, unit="TFLOP/s", ceiling=limit.gemm,
                peer="each tile of rows widens codes for itself", peer_seconds=each,
            )
        )  # fmt: skip
    return found


def _coded(kind: str, experts: int, rows: int, columns: int) -> ExpertWeights:
    """Random weights in one of the forms of `layer_rows`."""
    shape = (experts, rows, columns)
    if kind == "bf16":
        return ExpertWeights(torch.randn(shape, **BF16) / columns**0.5)
    if kind == "mxfp4":
        pairs = torch.randint(0, 256, (experts, rows, columns // 2), device="cuda", dtype=torch.uint8)
        exponents = torch.randint(116, 120, (experts, columns // 32, rows), device="cuda", dtype=torch.uint8)
        return ExpertWeights(pairs, exponents, torch.randn(experts, rows, **BF16))
    scales = torch.rand(experts, columns // 128, rows, device="cuda") * 1e-3
    if kind == "fp8":
        return ExpertWeights(torch.randint(0, 120, shape, device="cuda", dtype=torch.uint8).view(FP8), scales)
    pairs = torch.randint(0, 256, (experts, rows, columns // 2), device="cuda", dtype=torch.uint8)
    return ExpertWeights(pairs, scales.bfloat16())


def training_rows(experts: int, out: int, width: int, each: int, *, even: bool = True) -> list[dict[str, Any]]:
    """The three products of training, with the dense product of as many numbers as the limit."""
    tokens = experts * each
    sizes = torch.full((experts,), each)
    if not even:
        shares = torch.distributions.Dirichlet(torch.ones(experts)).sample()
        sizes = (shares * tokens).long()
        sizes[-1] += tokens - sizes.sum()
    ends = sizes.cumsum(0).int().cuda()
    x, flow = torch.randn(tokens, width, **BF16), torch.randn(tokens, out, **BF16)
    weight = torch.randn(experts, out, width, **BF16)
    one = weight[0].clone()
    products: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
        "forward": (
            lambda: by_rows(x, weight, ends, turned=False),
            lambda: F.grouped_mm(x, weight.mT, offs=ends),
            lambda: x @ one.T,
        ),
        "by x": (lambda: by_rows(flow, weight, ends, turned=True), lambda: F.grouped_mm(flow, weight, offs=ends), lambda: flow @ one),
        "by weight": (lambda: by_weights(flow, x, ends), lambda: F.grouped_mm(flow.mT, x, offs=ends), lambda: flow.T @ x),
    }  # fmt: skip
    load = f"{each} tokens each" if even else f"{each} tokens on average, loads of a Dirichlet distribution"
    flops = 2 * tokens * out * width
    found = []
    for name, runs in products.items():
        ours, theirs, dense = interleaved(runs, captured=False)
        found.append(
            row(
                f"grouped_linear in training, {name}, {experts} experts of {out} x {width}, {load}; limit: one dense product",
                ours, amount=flops, unit="TFLOP/s", ceiling=flops / dense, peer="torch grouped_mm",
                peer_seconds=theirs, target=1, of_target=0.85,
            )
        )  # fmt: skip
    return found


def expert_row(limit: Ceilings, experts: int, out: int, width: int, each: int) -> dict[str, Any]:
    """The product of a decoding step's tokens with their experts' weights; two sets of weights alternate."""
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
