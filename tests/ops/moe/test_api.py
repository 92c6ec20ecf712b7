"""Sorting by expert and back, and each expert's own product: plain paths against loops, and where they run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.ops import choose, grouped_linear, permute, unpermute
from hone.ops.dispatch import Where
from hone.ops.moe.api import takes_pieces

F64 = torch.float64
H200 = Where("cuda", (9, 0), 132, (3, 6))


@settings(max_examples=50)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_permute_is_a_stable_sort(tokens: int, top_k: int, experts: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=draw)
    x = torch.arange(tokens * 3, dtype=F64).view(tokens, 3)
    rows, ends, place = permute(x, ids, experts)
    entries = sorted(range(tokens * top_k), key=lambda entry: (int(ids.flatten()[entry]), entry))
    assert [int(row[0]) // 3 for row in rows] == [entry // top_k for entry in entries]
    assert ends.tolist() == [int((ids <= expert).sum()) for expert in range(experts)]
    assert [entries[spot] for spot in place.flatten().tolist()] == list(range(tokens * top_k))
    weights = torch.rand(tokens, top_k, dtype=F64, generator=draw)
    torch.testing.assert_close(unpermute(rows, place, weights), x * weights.sum(1, keepdim=True))
    torch.testing.assert_close(unpermute(rows, place), x * top_k)


def test_a_layer_of_experts_is_a_loop_over_tokens() -> None:
    x = torch.randn(9, 4, dtype=F64, requires_grad=True)
    weight = torch.randn(5, 3, 4, dtype=F64, requires_grad=True)
    shares = torch.rand(9, 2, dtype=F64, requires_grad=True)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    ids[ids == 2] = 3  # an expert without tokens

    def layer(x: torch.Tensor, weight: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        rows, ends, place = permute(x, ids, 5)
        return unpermute(grouped_linear(rows, weight, ends), place, shares)

    plain = torch.stack(
        [sum(shares[t, j] * (weight[ids[t, j]] @ x[t]) for j in range(2)) for t in range(9)]  # type: ignore[misc]
    )
    torch.testing.assert_close(layer(x, weight, shares), plain)
    assert torch.autograd.gradcheck(layer, (x, weight, shares))


def test_wrong_arguments_are_named() -> None:
    x, ids = torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(SpecError, match="expert_ids"):
        permute(x, ids[:3], 2)
    with pytest.raises(SpecError, match=r"expert_ids torch\.float32"):
        permute(x, ids.float(), 2)
    for wrong in (2, -1):  # more ends than experts, or an error of torch's
        with pytest.raises(SpecError, match=r"experts 0 \.\.\. 1"):
            permute(x, ids.index_fill(0, torch.tensor([1]), wrong), 2)
    with pytest.raises(SpecError, match="weight"):
        grouped_linear(x[:0], torch.randn(0, 3, 6), torch.zeros(0, dtype=torch.int32))
    with pytest.raises(SpecError, match="place"):
        unpermute(x, ids[:1])
    with pytest.raises(SpecError, match="ends"):
        grouped_linear(x, torch.randn(2, 3, 6), torch.tensor([1, 2, 4], dtype=torch.int32))
    with pytest.raises(SpecError, match="no gradient"):
        grouped_linear(
            x.requires_grad_(), torch.randn(2, 3, 6), torch.tensor([1, 4], dtype=torch.int32), backend="triton"
        )


def test_where_it_runs() -> None:
    def backend(
        where: Where = H200, dtype: torch.dtype = torch.bfloat16, rows: int = 512, grad: bool = False, width: int = 2048
    ) -> str:
        return choose(
            "grouped_linear", where, dtype=dtype, num_rows=rows, num_experts=128, sizes=(768, width), grad=grad
        ).backend

    assert backend() == "triton"
    assert backend(grad=True) == backend(rows=10**5) == "gluon"
    assert backend(Where("cuda", (8, 0), 108, (3, 6)), grad=True) == "torch"
    assert backend(rows=10**5, width=2047) == backend(dtype=torch.float32) == backend(Where()) == "reference"
    assert choose("permute", H200, dtype=torch.bfloat16).backend == "triton"
    assert choose("permute", H200, dtype=F64).backend == choose("permute", Where(), dtype=F64).backend == "reference"


def test_pieces_of_ranks_lie_in_rooms_of_their_own() -> None:
    x, ids = torch.randn(9, 4, requires_grad=True), torch.randint(0, 6, (9, 2))
    weights = torch.rand(9, 2)
    plain, ends, place = permute(x, ids, 6)
    rows, same, spread = permute(x, ids, 6, pieces=(3, 20))
    assert torch.equal(ends, same) and rows.shape == (60, 4)
    begin = 0
    for piece, end in enumerate(ends[1::2].tolist()):
        assert torch.equal(rows[piece * 20 : piece * 20 + end - begin], plain[begin:end])
        assert torch.equal(rows[piece * 20 + end - begin : piece * 20 + 20], x[:1].expand(20 - end + begin, -1))
        begin = end
    back = unpermute(rows * 2, spread, weights, in_pieces=True)
    torch.testing.assert_close(back, unpermute(plain * 2, place, weights))
    flow = torch.randn(9, 4)
    found, wanted = (
        torch.autograd.grad(one, x, flow, retain_graph=True)[0] for one in (back, unpermute(plain * 2, place, weights))
    )
    torch.testing.assert_close(found, wanted)


def test_what_does_not_fit_into_a_room_stays_inside_of_it() -> None:
    x, ids = torch.arange(8.0)[:, None], torch.zeros(8, 1, dtype=torch.int64)
    ids[6:] = 3
    rows, ends, place = permute(x, ids, 4, pieces=(2, 4))
    assert ends.tolist() == [6, 6, 6, 8] and place.flatten().tolist() == [0, 1, 2, 3, 3, 3, 4, 5]
    assert rows[4:6].flatten().tolist() == [6.0, 7.0]


def test_rows_that_are_nobodys_have_no_part_in_a_product() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    flow = torch.randn(8, 6)
    made = grouped_linear(x, weight, ends)
    assert made.shape == (8, 6)
    torch.testing.assert_close(made[:5], grouped_linear(x[:5], weight, ends))
    found = torch.autograd.grad(made, (x, weight), flow)
    wanted = torch.autograd.grad(grouped_linear(x[:5], weight, ends), (x, weight), flow[:5])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("room", [0, 9])
def test_products_of_rows_in_pieces(room: int) -> None:
    """Two pieces of three experts' rows, one after the other or in rooms, against rows that are sorted by expert."""
    counts = torch.tensor([[2, 0, 5], [1, 3, 0]])
    until = counts.cumsum(1)
    first = torch.arange(2) * room if room else torch.tensor([0, 7])
    starts, ends = (one.T.contiguous().int() for one in (until - counts + first[:, None], until + first[:, None]))
    num_rows = 2 * room or 11
    x, weight = torch.randn(num_rows, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    flow = torch.randn(num_rows, 6)
    assert takes_pieces(x, weight)
    spans = [slice(*span) for own in zip(starts.tolist(), ends.tolist()) for span in zip(*own)]
    lie = torch.cat([torch.arange(num_rows)[span] for span in spans])
    together = counts.sum(0).cumsum(0).int()
    made, plain = grouped_linear(x, weight, ends, starts=starts), grouped_linear(x[lie], weight, together)
    torch.testing.assert_close(made[lie], plain)
    found = torch.autograd.grad(made, (x, weight), flow)
    wanted = torch.autograd.grad(plain, (x, weight), flow[lie])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
