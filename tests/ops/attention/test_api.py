"""attend and merge on the CPU: every path against the formula in float64, gradients, unions of masks, clear errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import attend, attend_backward, merge
from hone.ops.attention import cudnn, masks
from hone.ops.attention.masks import CAUSAL, FULL, Mask

F64 = torch.float64
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 11])


def inputs(
    seq_q: int = 11, seq_k: int = 11, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = F64
) -> list[Tensor]:
    shapes = ((seq_q, heads, 6), (seq_k, kv_heads, 6), (seq_k, kv_heads, 5))
    return [torch.randn(2, *shape, dtype=dtype) for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None):
    """Query by query, from the definition."""
    kept = mask.dense(q.shape[1], k.shape[1], "cpu").expand(2, q.shape[2], -1, -1)
    out, lse = (
        torch.zeros(2, q.shape[1], q.shape[2], v.shape[3], dtype=F64),
        torch.empty(2, q.shape[2], q.shape[1], dtype=F64),
    )
    for b, i, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        seen = kept[b, h, i].nonzero()[:, 0]
        group = h // (q.shape[2] // k.shape[2])
        scores = scale * (k[b, seen, group] @ q[b, i, h])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        total = scores.exp().sum() + (0 if sinks is None else sinks[h].exp())
        lse[b, h, i] = total.log()
        if len(seen):
            out[b, i, h] = (scores.exp() / total) @ v[b, seen, group]
    return out, lse


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (CAUSAL, (11, 11)), (CAUSAL, (3, 11)), (CAUSAL, (11, 3)), (FULL, (4, 9)), (masks.window(3), (11, 11)),
        (masks.documents(IDS), (11, 11)), (masks.documents(IDS, 2), (11, 11)), (masks.prefix(torch.tensor([2, 7])), (11, 11)),
    ],
)  # fmt: skip
def test_every_path_is_the_definition(backend: str | None, mask: Mask, lengths: tuple[int, int]) -> None:
    q, k, v = inputs(*lengths)
    wanted, _ = written_out(q, k, v, mask, 6**-0.5, None, None)
    torch.testing.assert_close(attend(q, k, v, mask, backend=backend), wanted)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 1.0, 0.0], dtype=F64)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_options_and_lse(softcap: float | None, sinks: Tensor | None) -> None:
    q, k, v = inputs(11, 5)  # the first six queries see nothing
    out, lse = attend(q, k, v, scale=0.8, softcap=softcap, sinks=sinks, return_lse=True)
    wanted, wanted_lse = written_out(q, k, v, CAUSAL, 0.8, softcap, sinks)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[:, :6] == 0).all()
    assert torch.isneginf(lse[:, :, :6]).all() == (sinks is None)


@pytest.mark.slow
def test_gradients() -> None:
    q, k, v = (part.requires_grad_() for part in inputs(5, 4))
    sinks = torch.randn(4, dtype=F64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, CAUSAL, softcap=3.0, sinks=sinks, return_lse=True)

    torch.autograd.gradcheck(run, (q, k, v, sinks))

    def blind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, CAUSAL, softcap=3.0)

    torch.autograd.gradcheck(blind, (q, k, v))
    grads = torch.autograd.grad(blind(q, k, v).sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][:, 0] == 0).all()  # what sees nothing learns nothing


def test_half_precision_is_near() -> None:
    q, k, v = inputs()
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for backend in ("reference", "torch"):
            out = attend(q.to(dtype), k.to(dtype), v.to(dtype), masks.window(4), backend=backend)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), attend(q, k, v, masks.window(4)), atol=tolerance, rtol=tolerance)


def far(q, k, q_data, k_data, params):
    return (q >= k) & (q - k >= params[0])


def near(q, k, q_data, k_data, params):
    return (q >= k) & (q - k < params[0])


def test_a_union_of_masks_is_the_merge_of_its_parts() -> None:
    q, k, v = inputs()
    whole = attend(q, k, v, CAUSAL, return_lse=True)
    parts = [attend(q, k, v, Mask(rule, (4,)), return_lse=True) for rule in (near, far)]
    assert torch.isneginf(parts[1][1]).any()  # some rows see nothing of the second part
    for found, wanted in zip(merge(parts), whole):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(merge([merge(parts[:1]), *parts[1:]]), whole):
        torch.testing.assert_close(found, wanted)
    split = [attend(q, k[:, at], v[:, at], FULL, return_lse=True) for at in (slice(0, 3), slice(3, 4), slice(4, 11))]
    for found, wanted in zip(merge(split), attend(q, k, v, FULL, return_lse=True)):
        torch.testing.assert_close(found, wanted)


def test_merge_has_gradients_in_out_and_lse_and_none_that_are_nan() -> None:
    outs = torch.randn(2, 1, 3, 2, 4, dtype=F64, requires_grad=True)
    lses = torch.randn(2, 1, 2, 3, dtype=F64, requires_grad=True)

    def run(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return merge([(outs[0], lses[0]), (outs[1], lses[1])])

    torch.autograd.gradcheck(run, (outs, lses))
    blind = lses.detach().clone()
    blind[:, 0, 0, 0] = float("-inf")
    blind[0, 0, 1, 1] = float("-inf")
    blind.requires_grad_()
    out, lse = run(outs, blind)
    assert (out[0, 0, 0] == 0).all() and torch.isneginf(lse[0, 0, 0])
    torch.testing.assert_close(out[0, 1, 1], outs[1, 0, 1, 1])
    for grad in torch.autograd.grad(out.sum() + lse[0, 1].sum(), (outs, blind)):
        assert torch.isfinite(grad).all()


def test_gradients_through_a_merge_are_those_of_the_whole() -> None:
    leaves = [part.requires_grad_() for part in inputs()]
    upstream = torch.randn(2, 11, 4, 5, dtype=F64)
    whole = torch.autograd.grad(attend(*leaves, CAUSAL), leaves, upstream)
    out, _ = merge([attend(*leaves, Mask(rule, (4,)), return_lse=True) for rule in (near, far)])
    for found, wanted in zip(torch.autograd.grad(out, leaves, upstream), whole):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_parts_add_up_to_those_of_the_whole(softcap: float | None) -> None:
    leaves = [part.requires_grad_() for part in inputs()]
    out, lse = attend(*leaves, CAUSAL, return_lse=True, softcap=softcap)
    upstream = torch.randn_like(out)
    whole = torch.autograd.grad(out, leaves, upstream)
    q, k, v = (part.detach() for part in leaves)
    rest = (out.detach(), lse.detach(), upstream)
    d_q = torch.zeros_like(q)
    for at in (slice(0, 3), slice(3, 4), slice(4, 11)):
        tail = slice(at.start, None)  # the queries that attend to the first of these keys
        ours = q[:, tail], k[:, at], v[:, at], rest[0][:, tail], rest[1][..., tail], upstream[:, tail]
        places = torch.arange(at.start, 11)[None] - at.start
        mask = Mask(_up_to, (), q_data=places[:, None].int())
        part, d_k, d_v = attend_backward(*ours, mask, softcap=softcap)
        d_q[:, tail] += part
        torch.testing.assert_close(d_k, whole[1][:, at])
        torch.testing.assert_close(d_v, whole[2][:, at])
    torch.testing.assert_close(d_q, whole[0])


def _up_to(q, k, q_data, k_data, params):
    return k <= q_data


@pytest.mark.slow
def test_a_compiled_call_on_the_cpu_at_any_length() -> None:
    run = torch.compile(
        lambda q, k, v: attend(q, k, v, CAUSAL) + attend(q, k, v, FULL), fullgraph=True, backend="aot_eager"
    )
    for length in (11, 12, 13, 600):
        q, k, v = inputs(length, length, dtype=torch.float32)
        torch.testing.assert_close(run(q, k, v), attend(q, k, v, CAUSAL) + attend(q, k, v, FULL))


def test_what_is_asked_of_cudnn() -> None:
    """Its ops take these arguments and give these shapes; a GPU test says that they are right."""
    q, k, v = (
        torch.empty(2, length, heads, 96, device="meta", dtype=torch.bfloat16)
        for length, heads in ((9, 4), (7, 2), (7, 2))
    )
    tiles = FULL.tiles(9, 7, 16, 16, q.device)
    out, lse = cudnn.forward(q, k, v, tiles, 0.5, None)
    assert out.shape == q.shape and out.is_contiguous() and lse.shape == (2, 4, 9)
    grads = cudnn.backward(q, k, v, out, lse, out, None, tiles, 0.5, None)
    assert [made.shape for made in grads] == [q.shape, k.shape, v.shape] and all(made.is_contiguous() for made in grads)
    with pytest.raises(AssertionError, match="no gradient of lse"):
        cudnn.backward(q, k, v, out, lse, out, lse, tiles, 0.5, None)


def test_wrong_calls_say_so() -> None:
    q, k, v = inputs()
    with pytest.raises(SpecError, match=r"q is \[batch, sequence, heads, head_dim\]"):
        attend(q[0], k, v)
    with pytest.raises(SpecError, match="share one floating dtype"):
        attend(q, k.float(), v)
    with pytest.raises(SpecError, match="no multiple"):
        attend(q[:, :, :3], k, v)
    with pytest.raises(SpecError, match="differ in more than the head width"):
        attend(q, k, v[:, 1:])
    with pytest.raises(SpecError, match="differ in batch or head width"):
        attend(q[..., 1:], k, v)
    with pytest.raises(SpecError, match="scale is positive"):
        attend(q, k, v, scale=0.0)
    with pytest.raises(SpecError, match="scale is positive, not nan"):
        attend(q, k, v, scale=math.nan)
    with pytest.raises(SpecError, match="softcap is positive"):
        attend(q, k, v, softcap=0.0)
    with pytest.raises(SpecError, match="k on meta"):
        attend(q, k.to("meta"), v)
    with pytest.raises(SpecError, match=r"k .* has no heads"):
        attend(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(SpecError, match=r"q .* heads of width 0"):
        attend(q[..., :0], k[..., :0], v)
    with pytest.raises(SpecError, match="sinks is one number a query head"):
        attend(q, k, v, sinks=torch.zeros(3))
    with pytest.raises(SpecError, match="backend is 'cutlass'"):
        attend(q, k, v, backend="cutlass")
    with pytest.raises(SpecError, match="has no lse"):
        attend(q, k, v, backend="torch", return_lse=True)
    with pytest.raises(SpecError, match="for equal lengths"):  # said before anything is run
        attend(q[:, 1:], k, v, backend="cudnn")
    with pytest.raises(SpecError, match="without softcap"):
        attend(q, k, v, backend="cudnn", softcap=3.0)
    with pytest.raises(SpecError, match="full mask"):
        attend(q, k, v, masks.window(3), backend="cudnn")
    with pytest.raises(SpecError, match="is for 11 positions"):
        attend(q[:, 1:], k, v, masks.documents(IDS))
    # A kernel would read past the end of numbers for too few sequences, and those of other sequences of too many.
    for wrong in (IDS[:1].expand(q.shape[0] + 1, -1), IDS[:1].expand(q.shape[0] + 1, -1)[1:].to("meta")):
        with pytest.raises(SpecError, match=r"q_data is (for|on)"):
            attend(q, k, v, masks.documents(wrong))
    with pytest.raises(SpecError, match="table is for 1 sequences and 3 heads"):
        attend(q, k, v, masks.block_sparse(torch.ones(3, 1, 1, dtype=torch.bool), 16))
    with pytest.raises(SpecError, match="at least one part"):
        merge([])
    with pytest.raises(SpecError, match="different shapes"):
        merge([(q, torch.zeros(2, 4, 11)), (q[:, 1:], torch.zeros(2, 4, 10))])


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_no_tokens_give_nothing(lengths: tuple[int, int]) -> None:
    q, k, v = torch.randn(2, lengths[0], 4, 8), *torch.randn(2, 2, lengths[1], 2, 8)
    out, lse = attend(q, k, v, masks.FULL, return_lse=True)
    assert torch.equal(out, torch.zeros(q.shape)) and torch.equal(lse, torch.full((2, 4, lengths[0]), -math.inf))
    assert torch.equal(attend(q, k, v, masks.FULL), out)
