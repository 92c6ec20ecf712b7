"""One case of attention on a GPU, against float64: what the tests of each backend share.

Compiling is what these tests cost, a few seconds for every rule, width, dtype and share of heads: a case is one of many lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hone.ops import attend, merge
from hone.ops.attention import masks, reference
from hone.ops.attention.masks import CAUSAL, Mask

LENGTHS = [(1, 1), (2, 63), (129, 129), (333, 1400), (1025, 77), (1003, 1003), (1, 3000)]


def randoms(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def far_from(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def poison(*likes: Tensor) -> None:
    """Leaves NaN in memory that the next tensors of these sizes will be made of."""
    made = [torch.full_like(like, float("nan")) for like in likes for _ in range(2)]
    del made


def both_passes(
    inputs: list[Tensor], mask: Mask, upstream: list[Tensor], backend: str | None, by_lse: bool = True, **options
) -> list[Tensor]:
    """[out, lse, dq, dk, dv], the gradients of a sum over out and, if `by_lse`, over lse."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    out, lse = attend(*leaves, mask, return_lse=True, backend=backend, **options)
    total = (out * upstream[0]).sum()
    if by_lse:
        total = total + torch.where(torch.isfinite(lse), lse * upstream[1], 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def groups_of_every_head(batch: int, heads: int, seq_len: int) -> Mask:
    """Tokens of a run see each other, and every head cuts the row into runs of its own."""
    data = torch.randint(0, 9, (batch, heads, seq_len), device="cuda", dtype=torch.int32).sort(-1).values
    return Mask(masks._same_document, (), data, data)


def check(
    shape: tuple[int, int, int, int, int],
    widths: tuple[int, int],
    mask: Mask,
    backend: str | None,
    dtype: torch.dtype = torch.bfloat16,
    loose: bool = False,
    **options,
) -> None:
    """One case against float64, as near as torch's own arithmetic in `dtype` would be, twice with the same bits.

    shape: batch, Sq, Sk, heads, key heads. `loose`: dq's parts are added in no fixed order.
    """
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
        assert torch.equal(torch.isneginf(ours), blind), (shape, name)
        error = far_from(ours.masked_fill(blind, 0.0), true.masked_fill(blind, 0.0))
        assert error < (8e-3 if dtype == torch.bfloat16 else 2e-3), (shape, name, error)
        if loose and name[0] == "d":
            assert far_from(ours, twice) < 1e-3, (shape, name)
        else:
            assert torch.equal(ours, twice), (shape, name)


def check_lengths(
    lengths: Iterable[tuple[int, int]],
    heads: tuple[int, int],
    width: int,
    mask: Mask | Callable[[int, int], Mask],
    backend: str,
    dtype: torch.dtype = torch.bfloat16,
    **options,
) -> None:
    """`check` at each (Sq, Sk), with batches of 1 and 3 in turn; `mask` itself or made for (batch, Sq)."""
    for turn, (seq_q, seq_k) in enumerate(lengths):
        batch = 1 + 2 * (turn % 2)
        here = mask if isinstance(mask, Mask) else mask(batch, seq_q)
        check((batch, seq_q, seq_k, *heads), (width, width), here, backend, dtype, **options)


def random_documents(batch: int, seq_len: int) -> Tensor:
    """Ids that come back now and then, in runs of random length."""
    changes = torch.rand(batch, seq_len, device="cuda") < 0.01
    return changes.cumsum(-1) % 3


def check_slices(backend: str) -> None:
    """Slices of a fused tensor are read where they lie, and what is past the end does not matter."""
    whole = torch.full((2, 900, 12, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    whole[:, :700] = randoms(2, 700, 12, 128)
    inputs = list(whole[:, :700].split([8, 2, 2], dim=2)[:1]) + list(whole[:, :700].split([4, 4, 4], dim=2)[1:])
    upstream = [randoms(2, 700, 8, 128), torch.randn(2, 8, 700, device="cuda")]
    found = both_passes(inputs, CAUSAL, upstream, backend)
    exact = both_passes([part.double() for part in inputs], CAUSAL, upstream, "reference")
    assert all(far_from(ours, true) < 8e-3 for ours, true in zip(found, exact, strict=True))


def far(q, k, q_data, k_data, params):
    return (q >= k) & (q - k >= params[0])


def check_union(backend: str) -> None:
    """Causal attention is the merge of a window and what lies before it, in its gradients too."""
    leaves = [randoms(2, 700, heads, 128).requires_grad_() for heads in (8, 4, 4)]
    upstream = randoms(2, 700, 8, 128)
    whole, lse = attend(*leaves, CAUSAL, return_lse=True, backend=backend)
    parts = [masks.window(100), Mask(far, (100,))]
    out, joined = merge([attend(*leaves, part, return_lse=True, backend=backend) for part in parts])
    assert far_from(out, whole) < 5e-3
    torch.testing.assert_close(joined, lse, atol=1e-3, rtol=1e-4)
    for ours, true in zip(torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(whole, leaves, upstream)):
        assert far_from(ours, true) < 1e-2


def check_long(seq_len: int, backend: str) -> None:
    """Documents in a long row: right at its end, and in memory that is linear but for the lists."""
    inputs = [randoms(1, seq_len, heads, 128).requires_grad_() for heads in (2, 1, 1)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = (torch.arange(seq_len, device="cuda") // 999)[None]
    out, lse = attend(*inputs, masks.documents(ids, 500), return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, inputs, out.detach())
    peak = torch.cuda.max_memory_allocated() - before
    # Tensors of [S, 2, 128], in float32 at most, and lists of (S / 64)^2 numbers; a score matrix would be 4 S^2 bytes.
    assert peak < 6 * 4 * 256 * seq_len + 20 * (seq_len // 64) ** 2 + (64 << 20)
    tail = slice(seq_len - seq_len % 999 - 999, None)  # whole documents at the end, on their own
    parts = [part.detach()[:, tail].double().requires_grad_() for part in inputs]
    alone, alone_lse = reference.attend(*parts, masks.documents(ids[:, tail], 500))
    assert far_from(out[:, tail], alone) < 8e-3
    torch.testing.assert_close(lse[..., tail].double(), alone_lse, atol=2e-3, rtol=1e-4)
    for ours, true in zip(grads, torch.autograd.grad(alone, parts, out.detach()[:, tail].double())):
        assert far_from(ours[:, tail], true) < 1.2e-2


def check_graph(step: Callable[[], list[Tensor]], changes: Iterable[Callable[[], None]]) -> None:
    """A captured `step` gives what a new one does after each of `changes` to its inputs, and a replay allocates nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for change in changes:
        change()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        graph.replay()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        for figure in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.current"):
            assert after[figure] == before[figure], figure
        for ours, true in zip(found, step(), strict=True):
            assert far_from(ours, true) < 2e-3


def check_graph_of_documents(backend: str) -> None:
    leaves = [randoms(2, 512, heads, 128).requires_grad_() for heads in (4, 2, 2)]
    ids = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    upstream = randoms(2, 512, 4, 128)

    def step() -> list[Tensor]:
        out = attend(*leaves, masks.documents(ids), backend=backend)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    def change(pieces: int) -> None:
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        ids.copy_((torch.arange(512, device="cuda") * pieces // 512).expand(2, -1))

    check_graph(step, [lambda: change(1), lambda: change(5)])
