"""Kernels that sort tokens by expert, and products of few tokens, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hone.ops import choose_experts, expert_swiglu, grouped_linear, permute, unpermute
from hone.ops.moe.api import piece_spans
from hone.ops.moe.local import LocalExperts
from hone.ops.moe.weights import FP8, ExpertWeights, pack_pairs
from tests.ops.gpu_case import as_good, error, graded, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width"), [(1, 8, 256, 2048), (3, 2, 8, 100), (5000, 6, 64, 512)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_permute_and_back(tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weights = torch.rand(tokens, top_k, device="cuda").to(dtype)
    ids = torch.randint(0, experts, (tokens, top_k), device="cuda")
    ids[:, 0] = 1

    def layer(backend: str) -> Callable[..., Tensor]:
        def run(x: Tensor, weights: Tensor) -> Tensor:
            rows, _, place = permute(x, ids, experts, backend=backend)
            return unpermute(rows * 2, place, weights, backend=backend)

        return run

    as_good(layer, (x, weights))
    for ours, plain in zip(*(permute(x, ids, experts, backend=name) for name in ("triton", "reference"))):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 8, 128), (257, 8, 129), (512, 8, 128), (513, 8, 128), (8192, 4, 32)]
)
def test_rows_in_any_order(tokens: int, top_k: int, experts: int) -> None:
    x, ids = torch.randn(tokens, 64, device="cuda"), torch.randint(0, experts, (tokens, top_k), device="cuda")
    ids[: tokens // 3] = 3
    for _ in range(3):
        poison()
        rows, ends, place = permute(x, ids, experts, any_order=True)
        wanted = torch.bincount(ids.flatten(), minlength=experts).cumsum(0)
        assert torch.equal(ends.long(), wanted)
        assert torch.equal(torch.bucketize(place.long(), wanted, right=True), ids)
        assert torch.equal(rows[place.long()], x[:, None].expand(-1, top_k, -1))
        assert place.flatten().unique().numel() == tokens * top_k


@pytest.mark.parametrize(
    ("experts", "out", "width", "most"), [(128, 1536, 2048, 16), (64, 100, 264, 40), (16, 24, 41, 17)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_tokens(experts: int, out: int, width: int, most: int, dtype: torch.dtype) -> None:
    ends = torch.randint(0, most + 1, (experts,), device="cuda").cumsum(0).int()
    x = torch.randn(int(ends[-1]), width, device="cuda").to(dtype)
    weight = torch.randn(experts, out, width, device="cuda").to(dtype)
    poison()
    ours = grouped_linear(x, weight, ends)
    exact = grouped_linear(x.double(), weight.double(), ends, backend="reference")
    assert torch.equal(ours, grouped_linear(x, weight, ends, backend="triton"))
    assert error(ours, exact) < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize(
    ("sizes", "out", "width"),
    [
        ((100, 0, 128, 284), 128, 64),
        ((1, 63, 64, 65, 0), 264, 200),  # tiles of few rows, the last features of a tile
        ((0, 0, 700), 1408, 2048),
        ((40,) * 200, 136, 72),
        ((0, 0), 128, 64),
    ],
)
@pytest.mark.parametrize("backend", ["gluon", "torch"])
def test_training_is_the_loop(sizes: tuple[int, ...], out: int, width: int, backend: str) -> None:
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    x, weight = torch.randn(sum(sizes), width, device="cuda"), torch.randn(len(sizes), out, width, device="cuda")
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    exact = graded(lambda a, b: grouped_linear(a, b, ends, backend="reference"), x.double(), weight.double())
    poison()
    found = graded(lambda a, b: grouped_linear(a, b, ends, backend=backend), x.bfloat16(), weight.bfloat16())
    for one, truth in zip(found, exact, strict=True):
        assert error(one, truth) < 1e-2


def test_an_experts_gradient_has_nothing_of_the_next_experts_rows() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    ends = torch.tensor([70, 200], device="cuda", dtype=torch.int32)
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    flow = torch.randn(200, 128, device="cuda", dtype=torch.bfloat16)
    flow[70:] = float("inf")
    leaf = weight.requires_grad_()
    (found,) = torch.autograd.grad(grouped_linear(x, leaf, ends, backend="gluon"), leaf, flow)
    assert torch.isfinite(found[0]).all()
    assert not torch.isfinite(found[1]).all()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (3, 8, 1), (64, 64, 6), (2000, 128, 8)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_choice_of_experts(tokens: int, experts: int, top_k: int, score: str) -> None:
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(experts, 1024, device="cuda") / 30).bfloat16()
    bias = torch.randn(experts, device="cuda") / 10 if score == "sigmoid" else None
    poison()
    ids, weights = choose_experts(x, weight, top_k, score=score, bias=bias)  # type: ignore[arg-type]
    again = choose_experts(x, weight, top_k, score=score, bias=bias)  # type: ignore[arg-type]
    assert torch.equal(ids, again[0]) and torch.equal(weights, again[1])
    logits = x.double() @ weight.double().T
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    torch.testing.assert_close(choice.gather(-1, ids.long()), choice.topk(top_k, -1).values, rtol=0, atol=1e-5)
    exact = scores.gather(-1, ids.long())
    assert error(weights, exact / exact.sum(-1, keepdim=True)) < 1e-5


def weights_of(kind: str, experts: int, rows: int, columns: int) -> ExpertWeights:
    values = torch.randn(experts, rows, columns, device="cuda") / columns**0.5
    if kind == "dense":
        return ExpertWeights(values.bfloat16())
    if kind == "mxfp4":
        nibbles = torch.randint(-8, 8, (experts, rows, columns), device="cuda", dtype=torch.int8)
        exponents = torch.randint(118, 123, (experts, columns // 32, rows), device="cuda", dtype=torch.uint8)
        bias = torch.randn(experts, rows, device="cuda").bfloat16()
        return ExpertWeights(pack_pairs(nibbles, 32), exponents, bias)
    scales = (torch.rand(experts, columns // 128, rows, device="cuda") + 0.5) / 100
    if kind == "fp8":
        return ExpertWeights((values * 100).to(FP8), scales)
    codes = (values * 100).round().clamp(-128, 127).to(torch.int8)
    return ExpertWeights(pack_pairs(codes.clamp(-8, 7), 128) if kind == "int4" else codes, scales)


def exact_layer(x: Tensor, ids: Tensor, shares: Tensor, *weights: ExpertWeights, limit: float | None = None) -> Tensor:
    wide = [one if one.scales is not None else one._replace(values=one.values.double()) for one in weights]
    return expert_swiglu(x.double(), ids, shares.double(), *wide, limit=limit, backend="reference")


@pytest.mark.parametrize("kind", ["dense", "int4", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (3, 8, 2), (16, 128, 8), (300, 16, 4)])
def test_layers_of_experts(kind: str, tokens: int, experts: int, top_k: int) -> None:
    gate_up, down = weights_of(kind, experts, 512, 384), weights_of(kind, experts, 384, 256)
    x = torch.randn(tokens, 384, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, -1).indices
    ids[: tokens // 2] = ids[:1]
    shares = torch.rand(tokens, top_k, device="cuda")
    poison()
    found = expert_swiglu(x, ids, shares, gate_up, down, backend="triton")
    assert torch.equal(found, expert_swiglu(x, ids, shares, gate_up, down, backend="triton"))
    assert error(found, exact_layer(x, ids, shares, gate_up, down)) < 6e-3


@pytest.mark.parametrize("kind", ["dense", "int4", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize(("tokens", "backend"), [(1, None), (4, None), (16, None), (300, None), (5000, "grouped")])
def test_ranks_sum_to_the_layer(kind: str, tokens: int, backend: str | None) -> None:
    """Each of two ranks has half of the experts; the rest are nobody's. In a CUDA graph, replayed for another choice."""
    if backend == "grouped" and kind != "dense" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("codes are widened once for Hopper's products alone")
    experts, top_k = 32, 4
    gate_up, down = weights_of(kind, experts, 512, 384), weights_of(kind, experts, 384, 256)
    x = torch.randn(tokens, 384, device="cuda", dtype=torch.bfloat16)
    router = (torch.randn(experts, 384, device="cuda") / 20).bfloat16()
    total = torch.zeros(tokens, 384, device="cuda")
    for rank in range(2):
        own = slice(rank * 16, rank * 16 + 16)
        part = [ExpertWeights(*(None if one is None else one[own] for one in whole)) for whole in (gate_up, down)]
        slots = torch.full((experts, 1), 16, device="cuda", dtype=torch.int32)
        slots[own, 0] = torch.arange(16, device="cuda", dtype=torch.int32)
        counts = torch.zeros(experts, device="cuda", dtype=torch.int64)
        local = LocalExperts(slots, torch.ones(experts, device="cuda", dtype=torch.int32), 16, counts=counts)
        given = torch.randn_like(x)

        def layer(given: Tensor = given, local: LocalExperts = local, part: list[ExpertWeights] = part) -> Tensor:
            ids, shares = choose_experts(given, router, top_k, local=local)
            return expert_swiglu(given, ids, shares, *part, local_share=0.5, backend=backend)

        poison()
        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = layer()
        given.copy_(x)
        counts.zero_()
        graph.replay()
        total += made
        assert int(counts.sum()) == tokens * top_k
    ids, shares = choose_experts(x, router, top_k)
    assert error(total, exact_layer(x, ids, shares, gate_up, down)) < 1e-2


@pytest.mark.parametrize("kind", ["dense", "mxfp4"])
@pytest.mark.parametrize(("tokens", "backend"), [(1, None), (40, None), (400, None), (4000, "grouped")])
def test_experts_of_gpt_oss(kind: str, tokens: int, backend: str | None) -> None:
    """Biases, a clamped gate, 2880 columns; its router has biases, too."""
    if backend == "grouped" and kind != "dense" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("codes are widened once for Hopper's products alone")
    gate_up, down = weights_of(kind, 32, 2 * 2880, 2880), weights_of(kind, 32, 2880, 2880)
    biases = (torch.randn(32, len(one.values[0]), device="cuda").bfloat16() for one in (gate_up, down))
    gate_up, down = (one._replace(bias=bias) for one, bias in zip((gate_up, down), biases))
    x = torch.randn(tokens, 2880, device="cuda", dtype=torch.bfloat16)
    router, bias = (torch.randn(32, 2880, device="cuda") / 50).bfloat16(), torch.randn(32, device="cuda").bfloat16()
    ids, shares = choose_experts(x, router, 4, logit_bias=bias)
    logits = (x.double() @ router.double().T + bias.double()).topk(4, -1).values
    assert error(shares, logits.softmax(-1)) < 1e-5
    poison()
    found = expert_swiglu(x, ids, shares, gate_up, down, limit=7.0, backend=backend)
    some = slice(0, 40)
    assert error(found[some], exact_layer(x[some], ids[some], shares[some], gate_up, down, limit=7.0)) < 1e-2


@pytest.mark.parametrize("sizes", [(100, 0, 130, 0), (128, 64, 3, 0), (1, 63, 64, 65)])
def test_rows_that_are_nobodys_have_no_part_in_a_training(sizes: tuple[int, ...]) -> None:
    """Rows after the last expert's are finite in x alone: what comes of them is not, and must not be in a gradient."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    ends, real = torch.tensor(sizes, device="cuda").cumsum(0).int(), sum(sizes)
    x = torch.randn(real + 300, 64, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(len(sizes), 128, 64, device="cuda", dtype=torch.bfloat16) / 8
    down = torch.randn(len(sizes), 64, 128, device="cuda", dtype=torch.bfloat16) / 8
    flow = torch.randn(real + 300, 64, device="cuda", dtype=torch.bfloat16)
    flow[real:] = float("nan")

    def layer(backend: str, rows: int) -> Callable[..., Tensor]:
        return lambda a, b, c: grouped_linear(torch.tanh(grouped_linear(a[:rows], b, ends, backend=backend)), c, ends, backend=backend)  # fmt: skip

    leaves = [one.clone().requires_grad_() for one in (x, up, down)]
    poison()
    made = layer("gluon", real + 300)(*leaves)
    found = torch.autograd.grad(made, leaves, flow)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact = layer("reference", real)(*wide)
    wanted = torch.autograd.grad(exact, wide, flow[:real].double())
    assert error(made[:real], exact) < 1e-2
    for one, truth in zip((found[0][:real], *found[1:]), (wanted[0][:real], *wanted[1:]), strict=True):
        assert torch.isfinite(one).all() and error(one, truth) < 2e-2


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("room", [0, 320])
def test_training_with_rows_in_pieces_is_that_of_sorted_rows(pieces: int, room: int) -> None:
    """Two products after each other; in rooms what comes of nobody's rows is not finite."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    counts = torch.tensor([[100, 0, 130, 3], [128, 64, 0, 0], [0, 1, 63, 65]][:pieces], device="cuda")
    until, sizes = counts.cumsum(1), counts.sum(1)
    first = torch.arange(pieces, device="cuda") * room if room else sizes.cumsum(0) - sizes
    starts, ends = (one.T.contiguous().int() for one in (until - counts + first[:, None], until + first[:, None]))
    num_rows = pieces * room or int(sizes.sum())
    spans = [slice(*span) for own in zip(starts.tolist(), ends.tolist()) for span in zip(*own)]
    lie = torch.cat([torch.arange(num_rows, device="cuda")[span] for span in spans])
    together = counts.sum(0).cumsum(0).int()
    x = torch.randn(num_rows, 64, device="cuda", dtype=torch.bfloat16)
    up, down = (torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16) / 8 for shape in ((264, 64), (64, 264)))
    flow = torch.full((num_rows, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    flow[lie] = torch.randn(len(lie), 64, device="cuda", dtype=torch.bfloat16)
    leaves = [one.clone().requires_grad_() for one in (x, up, down)]
    poison()
    made = grouped_linear(
        torch.tanh(grouped_linear(leaves[0], leaves[1], ends, starts=starts)), leaves[2], ends, starts=starts
    )
    found = torch.autograd.grad(made, leaves, flow)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    inner = torch.tanh(grouped_linear(wide[0][lie], wide[1], together, backend="reference"))
    exact = grouped_linear(inner, wide[2], together, backend="reference")
    wanted = torch.autograd.grad(exact, wide, flow[lie].double())
    assert error(made[lie], exact) < 1e-2
    for one, truth in zip((found[0][lie], *found[1:]), (wanted[0][lie], *wanted[1:]), strict=True):
        assert torch.isfinite(one).all() and error(one, truth) < 2e-2


@pytest.mark.parametrize("room", [None, 5000, 12000])
def test_pieces_in_rooms_are_laid_out_as_in_plain_torch(room: int | None) -> None:
    """Where they fit (12000 rows) and where they do not, in which case rows of one place differ; and the spans of exact sizes."""
    counts = torch.randint(0, 900, (3, 24), device="cuda")
    found, wanted = (torch.zeros(2, 8, 3, device="cuda", dtype=torch.int32).unbind() for _ in range(2))
    piece_spans(counts, 1, room, found, backend="triton")
    piece_spans(counts, 1, room, wanted, backend="reference")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if room is None:
        return
    x, ids = torch.randn(5000, 64, device="cuda").bfloat16(), torch.randint(0, 24, (5000, 6), device="cuda")
    ours, plain = (permute(x, ids, 24, pieces=(3, room), backend=name) for name in ("triton", "reference"))
    assert torch.equal(ours[1], plain[1]) and torch.equal(ours[2], plain[2])
    kept = torch.ones(3 * room, device="cuda", dtype=torch.bool)
    kept[room - 1 :: room] = False  # the place of all that do not fit
    assert torch.equal(ours[0][kept], plain[0][kept])
