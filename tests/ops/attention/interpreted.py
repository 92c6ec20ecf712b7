"""The Triton attention kernels in the interpreter agree with the reference in float64, forward and backward, through `attend`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import attend, attend_backward
from hone.ops.attention import masks, reference
from hone.ops.attention import triton_forward as flash
from hone.ops.attention.masks import CAUSAL, FULL, Mask

OWN = torch.randint(0, 4, (2, 2, 64), dtype=torch.int32).sort(-1).values
IDS = torch.tensor([[0] * 30 + [1] * 41 + [2] * 9, [0] * 80])


def both(
    mask: Mask, heads: tuple[int, int], lengths: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, **options
) -> tuple[list[Tensor], list[Tensor]]:
    """(out, lse, dq, dk, dv) of the kernels and of the reference in float64, gradients of a sum over out and lse."""
    batch, (seq_q, seq_k) = 2, lengths
    shapes = ((seq_q, heads[0], widths[0]), (seq_k, heads[1], widths[0]), (seq_k, heads[1], widths[1]))
    inputs = [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]
    d_out, d_lse = torch.randn(batch, seq_q, heads[0], widths[1]), torch.randn(batch, heads[0], seq_q)
    results = []
    for backend in ("triton", "reference"):
        leaves = [(part if backend == "triton" else part.double()).clone().requires_grad_() for part in inputs]
        out, lse = attend(*leaves, mask, backend=backend, return_lse=True, **options)
        total = (out * d_out).sum() + lse.masked_fill(lse == float("-inf"), 0.0).mul(d_lse).sum()
        results.append([out, lse, *torch.autograd.grad(total, leaves)])
    return results[0], results[1]


@pytest.mark.parametrize(
    ("mask", "heads", "lengths", "widths"),
    [
        (CAUSAL, (2, 2), (70, 70), (16, 16)),
        (CAUSAL, (4, 1), (40, 150), (32, 32)),
        (CAUSAL, (2, 1), (150, 40), (32, 32)),
        (CAUSAL, (1, 1), (1, 1), (16, 16)),
        (FULL, (2, 1), (33, 140), (24, 40)),
        (masks.window(33), (2, 2), (140, 140), (16, 16)),
        (masks.window_with_sinks(20, 3), (1, 1), (40, 150), (16, 16)),
        (masks.documents(IDS), (2, 1), (80, 80), (16, 16)),
        (masks.documents(IDS, 20), (2, 2), (80, 80), (16, 16)),
        (masks.prefix(torch.tensor([5, 60])), (2, 2), (80, 80), (16, 16)),
        (masks.bigbird(100, block=16, num_heads=2, num_random=1, causal=True), (2, 1), (100, 100), (16, 16)),
        (Mask(masks._same_document, (), OWN, OWN), (2, 2), (64, 64), (16, 16)),
    ],
    ids=lambda value: value.name.partition(":")[2] if isinstance(value, Mask) else None,
)
def test_any_mask_and_shape(mask, heads, lengths, widths) -> None:
    found, wanted = both(mask, heads, lengths, widths, torch.float32)
    for ours, true in zip(found, wanted):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-5)


def test_gradients_of_parts_of_the_keys_add_up() -> None:
    """As ring attention calls the kernels: out and lse of all keys, another mask for each part of them."""
    leaves = [torch.randn(2, 80, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    mask = masks.documents(IDS)
    out, lse = attend(*(leaf.double() for leaf in leaves), mask, backend="reference", return_lse=True)
    d_out = torch.randn(2, 80, 4, 16)
    wanted = torch.autograd.grad(out, leaves, d_out.double())
    first = mask.q_data[:, 0]
    q, k, v, out, lse = (made.detach().float() for made in (*leaves, out, lse))
    found = [torch.zeros_like(part) for part in (q, k, v)]
    for queries, keys, causal in (
        (slice(0, 32), slice(0, 32), True),
        (slice(32, 80), slice(0, 32), False),
        (slice(32, 80), slice(32, 80), True),
    ):
        part = masks.since((first[:, queries] - keys.start).clamp(min=0), causal=causal)
        ours = q[:, queries], k[:, keys], v[:, keys], out[:, queries], lse[..., queries], d_out[:, queries]
        for total, at, grad in zip(found, (queries, keys, keys), attend_backward(*ours, part, backend="triton")):
            total[:, at] += grad
    for ours, true in zip(found, wanted):
        torch.testing.assert_close(ours, true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("widths", [(96, 96), (192, 128), (256, 256), (80, 24)])
def test_heads_in_two_pieces(widths: tuple[int, int]) -> None:
    found, wanted = both(CAUSAL, (1, 1), (20, 30), widths, torch.float32)
    for ours, true in zip(found, wanted):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-5)
    assert [flash.pieces(width) for width in (16, 64, 96, 192, 256, 80, 24, 5)] == [
        (16, 0), (64, 0), (64, 32), (128, 64), (256, 0), (64, 16), (16, 16), (16, 0),
    ]  # fmt: skip


def test_softcap_scale_and_sinks() -> None:
    options = {"softcap": 2.0, "scale": 0.7, "sinks": torch.tensor([0.5, -1.0])}
    found, wanted = both(CAUSAL, (2, 1), (30, 30), (16, 16), torch.float32, **options)
    for ours, true in zip(found, wanted):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-5)


def test_float16() -> None:
    found, wanted = both(masks.window(9), (2, 1), (50, 50), (32, 32), torch.float16)
    for ours, true in zip(found, wanted):
        torch.testing.assert_close(ours.double(), true, atol=5e-3, rtol=5e-3)


def test_slices_are_read_where_they_lie_and_what_is_past_the_end_does_not_matter() -> None:
    whole = torch.full((2, 60, 4, 16), float("nan"))
    whole[:, :50] = torch.randn(2, 50, 4, 16)
    q, k, v = whole[:, :50].split([2, 1, 1], dim=2)
    out = attend(q, k, v, masks.window(9), backend="triton")
    wanted, _ = reference.attend(q, k, v, masks.window(9))
    torch.testing.assert_close(out, wanted)


def test_without_a_gradient_by_lse_and_run_by_run_the_same() -> None:
    q, k, v = torch.randn(3, 1, 40, 2, 16).requires_grad_().unbind(0)
    runs = [torch.autograd.grad(attend(q, k, v, backend="triton").square().sum(), (q, k, v)) for _ in range(2)]
    exact = [part.detach().double().requires_grad_() for part in (q, k, v)]
    wanted = torch.autograd.grad(reference.attend(*exact)[0].square().sum(), exact)
    for once, again, true in zip(*runs, wanted):
        assert torch.equal(once, again)
        torch.testing.assert_close(once.double(), true, atol=1e-5, rtol=1e-5)


def test_compiles_whole() -> None:
    q, k, v = torch.randn(3, 2, 40, 2, 16).requires_grad_().unbind(0)

    near = masks.window(7)

    def loss(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        out, lse = attend(q * 1.5, k, v, near, return_lse=True, backend="triton")
        packed = attend(q, k, v, masks.documents(ids), backend="triton")
        return out.square().sum() + lse.mean() + packed.sum() + attend(q, k, v, backend="triton").square().sum()

    ids = torch.arange(40).expand(2, -1) // 9
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, true in zip(
        torch.autograd.grad(whole(q, k, v, ids), (q, k, v)), torch.autograd.grad(loss(q, k, v, ids), (q, k, v))
    ):
        torch.testing.assert_close(ours, true)
