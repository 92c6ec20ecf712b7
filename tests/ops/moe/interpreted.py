"""Kernels that sort tokens by expert in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops import grouped_linear, permute, unpermute
from hone.ops.moe.api import piece_spans
from tests.ops.agree import agree, graded


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(60, 5, 2), (3, 40, 3), (1, 1, 1)])
def test_permute_and_back(tokens: int, experts: int, top_k: int) -> None:
    x = torch.randn(tokens, 24, requires_grad=True)
    weights = torch.rand(tokens, top_k, requires_grad=True)
    ids = torch.randint(0, experts, (tokens, top_k))

    def run(backend: str) -> list[torch.Tensor]:
        rows, ends, place = permute(x, ids, experts, backend=backend)
        out = torch.cat((unpermute(rows, place, weights, backend=backend), unpermute(rows, place, backend=backend)))
        return [rows, ends, place, *graded(out, x, weights)]

    agree(run)


def test_entries_beyond_what_is_compared_with_each_other_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.ops.moe.api.FEW_IDS", 256)
    x, ids = torch.randn(200, 24), torch.randint(0, 5, (200, 3))
    agree(lambda backend: permute(x, ids, 5, backend=backend))


@pytest.mark.parametrize("ids_at_once", [4096, 16])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 5), (200, 5), (50, 40)])
def test_rows_in_any_order_are_their_experts(
    tokens: int, experts: int, ids_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.ops.moe.api.FEW_IDS", ids_at_once)
    monkeypatch.setattr("hone.ops.moe.api.COMPARED_IDS", 0)
    x, ids = torch.randn(tokens, 24), torch.randint(0, experts, (tokens, 3))
    rows, ends, place = permute(x, ids, experts, any_order=True, backend="triton")
    wanted = torch.bincount(ids.flatten(), minlength=experts).cumsum(0)
    assert torch.equal(ends.long(), wanted)
    assert torch.equal(torch.bucketize(place.long(), wanted, right=True), ids)
    assert torch.equal(rows[place.long()], x[:, None].expand(-1, 3, -1))
    assert place.flatten().unique().numel() == 3 * tokens


@pytest.mark.parametrize("ids_at_once", [4096, 16])
def test_nobodys_rows_are_neither_copied_nor_added(ids_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.ops.moe.api.FEW_IDS", ids_at_once)
    x, ids, weights = torch.randn(50, 24), torch.randint(0, 5, (50, 3)), torch.rand(50, 3)  # 4 is nobody

    def run(backend: str) -> list[torch.Tensor]:
        rows, ends, place = permute(x, ids, 4, leaves_out=True, backend=backend)
        rows[int(ends[-1]) :] = float("nan")  # they mean nothing
        return [rows[: int(ends[-1])], ends, place, unpermute(rows, place, weights, ends=ends, backend=backend)]

    agree(run)
    torch.testing.assert_close(run("triton")[3], x * (weights * (ids < 4)).sum(1, keepdim=True))


@pytest.mark.parametrize("width", [32, 40])
def test_few_tokens(width: int) -> None:
    ends = torch.tensor([3, 3, 20, 21, 40], dtype=torch.int32)  # none, one, and more than a tile holds
    x, weight = torch.randn(40, width), torch.randn(5, 20, width)
    agree(lambda backend: [grouped_linear(x, weight, ends, backend=backend)])


def test_pieces_of_ranks_lie_in_rooms_of_their_own() -> None:
    x, weights = torch.randn(30, 24, requires_grad=True), torch.rand(30, 3, requires_grad=True)
    ids = torch.randint(0, 6, (30, 3))

    def run(backend: str) -> list[torch.Tensor]:
        rows, ends, place = permute(x, ids, 6, pieces=(2, 70), backend=backend)
        out = unpermute(rows * 2, place, weights, in_pieces=True, backend=backend)
        return [rows, ends, place, *graded(out, x, weights)]

    agree(run)


@pytest.mark.parametrize("sizes", [(130, 0, 3, 0), (128, 64, 0, 0), (1, 1, 200, 70)])
def test_tiles_of_rows_end_with_a_whole_step_before_rows_that_are_nobodys(sizes: tuple[int, ...]) -> None:
    from hone.ops.moe.gluon_grouped import ROWS, STEP, list_tiles

    ends = torch.tensor(sizes).cumsum(0).int()
    for num_rows in (int(ends[-1]), int(ends[-1]) + 300):
        most = -(-num_rows // ROWS) + len(sizes)
        tiles = torch.full((most + 1, 3), -1, dtype=torch.int32)
        list_tiles[(-(-most // 64),)](
            ends, ends, tiles, num_rows, len(sizes), most, SPANS=4, PIECES=0, BLOCK=64, TILE=ROWS, STEP=STEP
        )
        wanted, begin = [], 0
        for expert, end in enumerate(ends.tolist()):
            until = end if end < int(ends[-1]) else min(begin + -(-(end - begin) // STEP) * STEP, num_rows)
            wanted += [[expert, first, until] for first in range(begin, end, ROWS)]
            begin = end
        assert tiles[: len(wanted)].tolist() == wanted and int(tiles[-1, 0]) == len(wanted)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("room", [0, 270])
def test_tiles_of_rows_in_pieces_are_those_of_each_span(room: int, empty: bool) -> None:
    """Of exact sizes (0), or in rooms; an expert's spans stand beside each other. A step reaches into the next piece where that has no rows."""
    from hone.ops.moe.gluon_grouped import ROWS, STEP, list_tiles

    counts = torch.tensor(
        [[130, 0, 131], [0, 0, 0] if empty else [200, 64, 0]]
    )  # of each piece, rows for each of three experts
    sizes = counts.sum(1)
    first = torch.arange(2) * room if room else sizes.cumsum(0) - sizes
    until = counts.cumsum(1) + first[:, None]
    starts, ends = (one.T.contiguous().int() for one in (until - counts, until))
    num_rows = 2 * room or int(sizes.sum())
    most = -(-num_rows // ROWS) + 6
    tiles = torch.full((most + 1, 3), -1, dtype=torch.int32)
    list_tiles[(1,)](starts, ends, tiles, num_rows, 3, most, SPANS=8, PIECES=2, BLOCK=64, TILE=ROWS, STEP=STEP)
    wanted = []
    for expert, spans in enumerate(zip(starts.tolist(), ends.tolist())):
        for piece, (begin, end) in enumerate(zip(*spans)):
            limit = [num_rows if empty else starts[0, 1].item(), num_rows][piece]
            last = end == until[piece, -1].item()
            final = min(begin + -(-(end - begin) // STEP) * STEP, limit) if last else end
            wanted += [[expert, at, final] for at in range(begin, end, ROWS)]
    assert tiles[: len(wanted)].tolist() == wanted and int(tiles[-1, 0]) == len(wanted)


@pytest.mark.parametrize("room", [None, 9])
def test_spans_of_experts_in_each_ranks_piece(room: int | None) -> None:
    counts = torch.randint(0, 5, (3, 12))
    counts[1, 4:8] = 0

    def run(backend: str) -> list[torch.Tensor]:
        into = torch.empty(2, 4, 3, dtype=torch.int32).unbind()
        piece_spans(counts, 1, room, into, backend=backend)
        return list(into)

    agree(run)


def test_what_does_not_fit_into_a_room_stays_inside_of_it() -> None:
    x, ids = torch.arange(8.0)[:, None], torch.tensor([0, 0, 0, 0, 0, 0, 3, 3])[:, None]
    rows, ends, place = permute(x, ids, 4, pieces=(2, 4), backend="triton")
    assert ends.tolist() == [6, 6, 6, 8] and place.flatten().tolist() == [0, 1, 2, 3, 3, 3, 4, 5]
    assert rows[:3].flatten().tolist() == [0, 1, 2] and rows[4:].flatten().tolist() == [6, 7, 0, 0]
