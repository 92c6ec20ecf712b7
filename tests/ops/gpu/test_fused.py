"""Fused kernels on a GPU against float64: ragged shapes, strided rows, poisoned outputs, two runs bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import fused, linear_cross_entropy
from hone.ops.moe import api as grouped
from hone.ops.reference import Lesson
from hone.ops.sample import api as sampling

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def poison() -> None:
    """Leaves memory that the next allocations reuse full of not-a-numbers: what a kernel does not write shows."""
    held = [torch.full((1 << size,), float("nan"), device="cuda") for size in (8, 12, 16, 20, 22) for _ in range(4)]
    del held


def graded(op: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = op(*leaves)
    flow = torch.arange(out.numel(), device="cuda", dtype=torch.float64).cos().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, flow)]


def as_good(op: Callable[[str], Callable[..., Tensor]], inputs: Sequence[Tensor], plain: str = "reference") -> None:
    """The kernel's error is at most twice that of plain torch in the same dtype, and two runs agree bit for bit."""
    poison()
    first = graded(op("triton"), *inputs)
    poison()
    second = graded(op("triton"), *inputs)
    eager = graded(op(plain), *inputs)
    exact = graded(op("reference"), *(one.double() for one in inputs))
    for one, two, same, truth in zip(first, second, eager, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, truth) <= 2 * error(same, truth) + 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (33, 8192), (7, 100), (3, 5, 8, 128), (2, 16384), (20011, 64)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 3, shape[-1], device="cuda").to(dtype)
    weight = torch.rand(shape[-1], device="cuda").to(dtype)
    residual = torch.randn(shape, device="cuda").to(dtype)

    def alone(backend: str) -> Callable[..., Tensor]:
        return lambda h, w: fused.rms_norm(h[..., 1:-2, :], w, 1e-5, backend=backend)

    def added(backend: str) -> Callable[..., Tensor]:
        return lambda h, w, r: torch.cat(fused.rms_norm(h[..., 1:-2, :], w, 1e-5, r, backend=backend))

    as_good(alone, (heads, weight))
    as_good(added, (heads, weight, residual))
    for kind in ("fp8", "int8"):
        poison()
        ours, plain = (
            fused.rms_norm(heads[..., 1:-2, :], weight, 1e-5, residual, kind, backend=backend)
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(ours[1], plain[1])
        assert torch.equal(ours[2], plain[2])
        assert (ours[0].float() != plain[0].float()).float().mean() < 2e-3
        assert error(ours[0].float() * ours[1], (plain[0].float() * plain[1]).double()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 14336), (5, 3, 100), (1001, 2050)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    as_good(lambda backend: lambda x: fused.swiglu(x, backend=backend), (torch.randn(shape, device="cuda").to(dtype),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "angles"), [((2, 33, 10, 128), (33,)), ((65, 40, 64), (65,)), ((2, 7, 3, 96), (2, 7))]
)
def test_rope(dtype: torch.dtype, shape: tuple[int, ...], angles: tuple[int, ...]) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 5, shape[-1], device="cuda").to(dtype)
    turn = torch.randn(*angles, 1, shape[-1] // 2, device="cuda")
    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
    as_good(
        lambda backend: lambda x: fused.rope(x[..., 2:-3, :], cos.to(x.dtype), sin.to(x.dtype), backend=backend),
        (heads,),
    )
    turned = heads.clone()
    fused.rope(turned[..., 2:-3, :], cos, sin, in_place=True)
    assert torch.equal(turned[..., 2:-3, :], fused.rope(heads[..., 2:-3, :], cos, sin))
    assert torch.equal(turned[..., :2, :], heads[..., :2, :]) and torch.equal(turned[..., -3:, :], heads[..., -3:, :])


@pytest.mark.parametrize("pages_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (6, 6, 96), (1, 1, 64)])
def test_rope_write(pages_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    count, page_size = 301, 16
    qkv = torch.randn(count, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    turn = torch.randn(count, 1, head_dim // 2, device="cuda")
    slots = torch.randperm(40 * page_size, device="cuda")[:count]
    found = []
    for backend in ("triton", "reference"):
        q, k, v = (given := qkv.clone()).split([heads, kv_heads, kv_heads], 1)
        pages = torch.full((2, 40, kv_heads, page_size, head_dim), 7.0, device="cuda").to(pages_dtype)
        scales = (
            torch.full((2, 40, kv_heads, page_size), 3.0, device="cuda") if pages_dtype.itemsize == 1 else (None, None)
        )
        fused.rope_write(
            q, k, v, turn.cos().bfloat16(), turn.sin().bfloat16(), *pages, slots // page_size, slots % page_size, *scales,
            backend=backend,
        )  # fmt: skip
        known = pages.float() if scales[0] is None else pages.float() * scales[..., None]  # type: ignore[index]
        found.append((given, *known))
    assert torch.equal(found[0][0][:, heads:], qkv[:, heads:])
    for ours, plain in zip(*found):
        assert error(ours, plain.double()) < 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "vocab", "options"),
    [
        (1, 64, 1000, {}),
        (1300, 128, 5003, {"z_loss": 1e-3}),
        (257, 64, 32000, {"label_smoothing": 0.1, "rows": 100}),
        (300, 128, 5003, {"lesson": 2.0, "rows": 128}),
        (300, 128, 5003, {"lesson": 1.0, "reduction": "sum", "rows": 20}),  # more chunks than are summed in bf16
    ],
)
def test_loss(dtype: torch.dtype, tokens: int, width: int, vocab: int, options: dict) -> None:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weight = (torch.randn(vocab, width, device="cuda") * 0.1).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    targets[1::7] = -100
    hidden, teacher = torch.randn(tokens, 96, device="cuda").to(dtype), torch.randn(vocab, 96, device="cuda").to(dtype)

    def loss(backend: str) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            given = dict(options)
            if "lesson" in given:
                given["lesson"] = Lesson(hidden.to(x.dtype), teacher.to(x.dtype) * 0.1, 0.6, given["lesson"])
            return linear_cross_entropy(x, weight, targets, backend=backend, **given)

        return run

    found = [graded(loss("triton"), x, weight) for _ in range(2)]
    exact = graded(loss("reference"), x.double(), weight.double())
    close = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for one, two, truth in zip(*found, exact, strict=True):
        assert torch.equal(one, two)
        assert error(one, truth) < close


def test_loss_memory_is_an_eighth_and_gradients_are_not_copied() -> None:
    tokens, width, vocab = 8192, 256, 32000
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    for _ in range(2):  # the first call also fetches the libraries' workspaces
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward()
        grown = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + weight.numel())
    assert grown <= tokens * vocab * 2 / 8 + (1 << 20)
    with pytest.raises(SpecError, match="compute the loss again"):
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward(retain_graph=True)
        loss.backward()


def test_loss_and_norm_under_compile() -> None:
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(999, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.rand(64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 999, (300,), device="cuda")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(fused.rms_norm(x, scale, 1e-5), weight, targets, rows=128)

    eager, compiled = graded(run, x, weight), graded(torch.compile(run, fullgraph=True), x, weight)
    for one, two in zip(eager, compiled):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-3)


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
            rows, _, place = grouped.permute(x, ids, experts, backend=backend)
            return grouped.unpermute(rows * 2, place, weights, backend=backend)

        return run

    as_good(layer, (x, weights))
    for ours, plain in zip(*(grouped.permute(x, ids, experts, backend=name) for name in ("triton", "reference"))):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("experts", "out", "width", "most"), [(128, 1536, 2048, 16), (64, 100, 264, 40), (16, 24, 41, 17)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_tokens(experts: int, out: int, width: int, most: int, dtype: torch.dtype) -> None:
    ends = torch.randint(0, most + 1, (experts,), device="cuda").cumsum(0).int()
    x = torch.randn(int(ends[-1]), width, device="cuda").to(dtype)
    weight = torch.randn(experts, out, width, device="cuda").to(dtype)
    poison()
    ours = grouped.grouped_linear(x, weight, ends)
    exact = grouped.grouped_linear(x.double(), weight.double(), ends, backend="reference")
    assert torch.equal(ours, grouped.grouped_linear(x, weight, ends, backend="triton"))
    assert error(ours, exact) < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


def test_grouped_training_is_the_loop() -> None:
    ends = torch.tensor([100, 100, 228, 512], device="cuda", dtype=torch.int32)
    x, weight = torch.randn(512, 64, device="cuda"), torch.randn(4, 128, 64, device="cuda")
    exact = graded(lambda a, b: grouped.grouped_linear(a, b, ends, backend="reference"), x.double(), weight.double())
    found = graded(lambda a, b: grouped.grouped_linear(a, b, ends), x.bfloat16(), weight.bfloat16())
    for one, truth in zip(found, exact):
        assert error(one, truth) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 128256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": [0, 1, 40] * 4, "top_p": [1.0, 0.9, 0.3] * 4, "min_p": [0.0, 0.1, 0.02] * 4},
    ],
)
def test_sample(dtype: torch.dtype, vocab: int, options: dict) -> None:
    logits = (torch.randn(12, vocab, device="cuda") * 3).to(dtype)
    heat = [0.0, 0.7, 1.0, 1.5] * 3
    for seed in range(4):
        keys = sampling.noise_keys(range(seed, seed + 12), range(12), device="cuda")
        ours = sampling.sample(logits, heat, **options, keys=keys)
        assert torch.equal(ours, sampling.sample(logits, heat, **options, keys=keys, backend="reference"))
        row = sampling.sample(
            logits[5:6],
            0.7,
            **{k: v if isinstance(v, int | float) else v[5] for k, v in options.items()},
            keys=keys[5:6],
        )
        assert row == ours[5]
        cpu = sampling.sample(logits.cpu(), heat, keys=keys.cpu())
        assert options or (cpu == ours.cpu()).all()


def test_replays_of_a_graph_allocate_nothing_and_see_new_values() -> None:
    x, residual = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    seeds, positions = torch.arange(64, device="cuda"), torch.arange(64, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        y, _ = fused.rms_norm(x, weight, 1e-5, residual)
        heat = torch.ones(64, device="cuda")
        return y, sampling.sample(fused.swiglu(y), heat, keys=sampling.noise_keys(seeds, positions))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, tokens = step()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        x.normal_()
        positions += 1
        graph.replay()
        torch.testing.assert_close(y, F.rms_norm(x + residual, (512,), weight, 1e-5), atol=0.03, rtol=0.02)
        fresh = step()
        assert torch.equal(fresh[0], y) and torch.equal(fresh[1], tokens)
        del fresh
    assert torch.cuda.memory_allocated() == before
