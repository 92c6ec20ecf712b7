"""Attention kernels on a GPU: random shapes and masks against float64, poisoned memory, bit-equal runs, graphs, compile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hone.ops import attend, masks, merge, reference
from hone.ops.dispatch import locate
from hone.ops.masks import CAUSAL, FULL, Mask

pytestmark = pytest.mark.gpu
BACKENDS = ["triton", "gluon"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "gluon" and not locate("cuda").runs_gluon:
        pytest.skip("Gluon kernels need compute capability 9.0")
    return request.param


def randoms(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def poison(*likes: Tensor) -> None:
    """Leaves NaN in memory that the next tensors of these sizes will be made of."""
    made = [torch.full_like(like, float("nan")) for like in likes for _ in range(2)]
    del made


def far_from(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def both_passes(inputs: list[Tensor], mask: Mask, upstream: list[Tensor], backend: str, **options) -> list[Tensor]:
    """[out, lse, dq, dk, dv]."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    out, lse = attend(*leaves, mask, return_lse=True, backend=backend, **options)
    seen = torch.isfinite(lse)
    total = (out * upstream[0]).sum() + torch.where(seen, lse * upstream[1], 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def check(
    shape: tuple[int, int, int, int, int],
    widths: tuple[int, int],
    mask: Mask,
    backend: str,
    dtype=torch.bfloat16,
    **options,
) -> None:
    """One case against float64, as near as torch's own arithmetic in `dtype` would be, twice with the same bits."""
    batch, seq_q, seq_k, heads, kv_heads = shape
    shapes = ((seq_q, heads, widths[0]), (seq_k, kv_heads, widths[0]), (seq_k, kv_heads, widths[1]))
    inputs = [randoms(batch, *part, dtype=dtype) for part in shapes]
    upstream = [randoms(batch, seq_q, heads, widths[1], dtype=dtype), torch.randn(batch, heads, seq_q, device="cuda")]
    poison(upstream[0], upstream[1], *inputs)
    found = both_passes(inputs, mask, upstream, backend, **options)
    again = both_passes(inputs, mask, upstream, backend, **options)
    exact = both_passes(
        [part.double() for part in inputs], mask, [part.double() for part in upstream], "reference", **options
    )
    for name, ours, twice, true in zip(("out", "lse", "dq", "dk", "dv"), found, again, exact, strict=True):
        blind = torch.isneginf(true)
        assert torch.equal(torch.isneginf(ours), blind), name
        error = far_from(ours.masked_fill(blind, 0.0), true.masked_fill(blind, 0.0))
        assert error < (8e-3 if dtype == torch.bfloat16 else 2e-3), (name, error)
        # The Gluon backward adds dq's parts in no fixed order.
        if name == "dq" and backend == "gluon" and not options.get("deterministic"):
            assert far_from(ours, twice) < 1e-3
        else:
            assert torch.equal(ours, twice), name


def some_mask(chance: random.Random, batch: int, seq_q: int, seq_k: int) -> Mask:
    device = "cuda"
    kinds: list[Callable[[], Mask]] = [
        lambda: CAUSAL,
        lambda: FULL,
        lambda: masks.window(chance.choice([1, 17, 128, 300])),
        lambda: masks.window_with_sinks(chance.choice([5, 200]), 4),
        lambda: masks.band(chance.choice([0, 60]), 90),
    ]
    if seq_q == seq_k:
        ids = torch.randint(0, 9, (batch, seq_q), device=device).sort(-1).values
        kinds += [
            lambda: masks.documents(ids),
            lambda: masks.documents(ids, 70),
            lambda: masks.prefix(torch.randint(0, seq_q, (batch,), device=device)),
            lambda: masks.longformer(torch.rand(batch, seq_q, device=device) < 0.01, 50, 50),
            lambda: masks.bigbird(seq_q, block=128, causal=chance.random() < 0.5, device=device),
        ]
    return chance.choice(kinds)()


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes_and_masks(seed: int, backend: str) -> None:
    chance = random.Random(seed)
    width = chance.choice([64, 128])
    kv_heads = chance.choice([1, 2])
    heads = kv_heads * chance.choice([1, 2, 3, 8, 16])
    seq_q = chance.choice([1, 2, 63, 64, 129, 500, 1025])
    seq_k = seq_q if chance.random() < 0.6 else chance.choice([1, 77, 128, 1400])
    batch = chance.choice([1, 3])
    mask = some_mask(chance, batch, seq_q, seq_k)
    dtype = chance.choice([torch.bfloat16, torch.float16])
    check((batch, seq_q, seq_k, heads, kv_heads), (width, width), mask, backend, dtype)


@pytest.mark.parametrize("widths", [(32, 32), (96, 96), (192, 128), (192, 192), (256, 256), (80, 24)])
def test_widths_of_the_triton_kernels(widths: tuple[int, int]) -> None:
    check((2, 300, 433, 4, 2), widths, CAUSAL, "triton")
    ids = torch.randint(0, 5, (2, 300), device="cuda").sort(-1).values
    check((2, 300, 300, 4, 2), widths, masks.documents(ids), "triton")


@pytest.mark.parametrize("block", [16, 32, 64])
def test_small_blocks_of_a_table(block: int) -> None:
    check((1, 500, 500, 4, 2), (64, 64), masks.bigbird(500, block=block, num_heads=4, device="cuda"), "triton")


def test_options(backend: str) -> None:
    check((2, 300, 300, 4, 2), (128, 128), CAUSAL, backend, softcap=3.0, scale=0.2)
    check((2, 300, 300, 4, 2), (128, 128), CAUSAL, backend, sinks=torch.randn(4, device="cuda"))
    check((2, 300, 300, 4, 2), (128, 128), masks.window(40), backend, deterministic=True)


def test_sorted_chunks_see_by_original_place(backend: str) -> None:
    positions = torch.stack([torch.randperm(1024, device="cuda") for _ in range(8)]).view(2, 4, 1024)
    check((2, 1024, 1024, 4, 4), (64, 64), masks.lsh(positions, 128), backend)


def test_slices_are_read_where_they_lie_and_what_is_past_the_end_does_not_matter(backend: str) -> None:
    whole = torch.full((2, 900, 12, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    whole[:, :700] = randoms(2, 700, 12, 128)
    inputs = list(whole[:, :700].split([8, 2, 2], dim=2))
    upstream = [randoms(2, 700, 8, 128), torch.randn(2, 8, 700, device="cuda")]
    found = both_passes(inputs, CAUSAL, upstream, backend)
    exact = both_passes([part.double() for part in inputs], CAUSAL, upstream, "reference")
    assert all(far_from(ours, true) < 8e-3 for ours, true in zip(found, exact))


def near(q, k, q_data, k_data, params):
    return (q >= k) & (q - k < params[0])


def far(q, k, q_data, k_data, params):
    return (q >= k) & (q - k >= params[0])


def test_a_union_of_masks_is_the_merge_of_its_parts(backend: str) -> None:
    leaves = [randoms(2, 700, heads, 128).requires_grad_() for heads in (8, 2, 2)]
    upstream = randoms(2, 700, 8, 128)
    whole, lse = attend(*leaves, CAUSAL, return_lse=True, backend=backend)
    out, joined = merge([attend(*leaves, Mask(rule, (100,)), return_lse=True, backend=backend) for rule in (near, far)])
    assert far_from(out, whole) < 5e-3
    torch.testing.assert_close(joined, lse, atol=1e-3, rtol=1e-4)
    for ours, true in zip(torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(whole, leaves, upstream)):
        assert far_from(ours, true) < 1e-2


@pytest.mark.parametrize("seq_len", [70001, 131072])
def test_memory_is_linear_and_long_sequences_are_right(seq_len: int, backend: str) -> None:
    inputs = [randoms(1, seq_len, 1, 64).requires_grad_() for _ in range(3)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mask = masks.documents((torch.arange(seq_len, device="cuda") // 999)[None], 500)
    out, lse = attend(*inputs, mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, inputs, out.detach())
    peak = torch.cuda.max_memory_allocated() - before
    # Tensors of [S, 64], in float32 at most, and lists of (S / 64)^2 numbers; a score matrix would be 2 S^2 bytes.
    assert peak < 12 * 4 * 64 * seq_len + 20 * (seq_len // 64) ** 2 + (64 << 20)
    tail = slice(seq_len - seq_len % 999 - 999, None)  # whole documents at the end, on their own
    parts = [part.detach()[:, tail].double().requires_grad_() for part in inputs]
    alone, alone_lse = reference.attend(
        *parts, masks.documents((torch.arange(seq_len, device="cuda") // 999)[None, tail], 500)
    )
    assert far_from(out[:, tail], alone) < 8e-3
    torch.testing.assert_close(lse[..., tail].double(), alone_lse, atol=2e-3, rtol=1e-4)
    for ours, true in zip(grads, torch.autograd.grad(alone, parts, out.detach()[:, tail].double())):
        assert far_from(ours[:, tail], true) < 1.2e-2


def test_a_long_dense_row(backend: str) -> None:
    q, k, v = (randoms(1, length, 2, 128) for length in (3, 70001, 70001))
    out, lse = attend(q, k, v, CAUSAL, return_lse=True, backend=backend)
    exact, exact_lse = reference.attend(q.double(), k.double(), v.double())
    assert far_from(out, exact) < 8e-3
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-4)


def test_a_graph_replays_with_new_numbers_and_new_documents(backend: str) -> None:
    leaves = [randoms(2, 512, 4, 128).requires_grad_() for _ in range(3)]
    ids = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    upstream = randoms(2, 512, 4, 128)

    def step() -> list[Tensor]:
        out = attend(*leaves, masks.documents(ids), backend=backend)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for pieces in (1, 5):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        ids.copy_((torch.arange(512, device="cuda") * pieces // 512).expand(2, -1))
        memory = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == memory
        for ours, true in zip(found, step()):
            assert far_from(ours, true) < 2e-3


def test_compiles_whole(backend: str) -> None:
    leaves = [randoms(2, 512, 4, 128).requires_grad_() for _ in range(3)]
    window = masks.window(64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(q * 1.5, k, v, window, return_lse=True, backend=backend)
        return out.float().square().mean() + lse.mean() + attend(q, k, v, backend=backend).float().sum()

    whole = torch.compile(loss, fullgraph=True)
    for ours, true in zip(torch.autograd.grad(whole(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)):
        assert far_from(ours, true) < 5e-3


def test_what_runs_unasked_is_right() -> None:
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 64), (torch.float16, 320)):
        q, k, v = (randoms(1, 200, heads, width, dtype=dtype) for heads in (4, 2, 2))
        for mask in (CAUSAL, FULL, masks.window(20)):
            exact, _ = reference.attend(q.double(), k.double(), v.double(), mask)
            assert far_from(attend(q, k, v, mask), exact) < 8e-3
