"""What runs before and after the Hopper attention backward, in the interpreter: row sums, the order of tiles, dq's last rounding."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from hone.ops.attention.gluon_passes import finish, prepare

BATCH, SEQ, HEADS, DIM, ROWS = 2, 70, 2, 16, 32
NUM_M = -(-SEQ // ROWS)


def test_sums_and_data_and_zeros():
    out, d_out = torch.randn(2, BATCH, SEQ, HEADS, DIM)
    lse, d_lse = torch.randn(2, BATCH, HEADS, SEQ)
    lse[0, 1, 3] = float("-inf")
    data = torch.randint(0, 99, (BATCH, 1, SEQ), dtype=torch.int32)
    stats = torch.full((BATCH, HEADS, NUM_M, 3, ROWS), float("nan"))
    dq_sum = torch.full((BATCH, HEADS, NUM_M * ROWS, DIM), float("nan"))
    counter = torch.full((2,), 7, dtype=torch.int32)
    prepare[(NUM_M, HEADS, BATCH)](
        out, d_out, lse, d_lse, stats, dq_sum, counter, data, counter, counter, *out.stride()[:3], *d_out.stride()[:3],
        SEQ, 0, SEQ, HEADS, 0, 1, 1, 1, False, True, True, DIM, ROWS,
    )  # fmt: skip
    assert counter.tolist() == [0, 7]
    assert not dq_sum.any()
    rows = stats.transpose(2, 3).reshape(BATCH, HEADS, 3, NUM_M * ROWS)
    seen = torch.isfinite(lse)
    torch.testing.assert_close(rows[..., 0, :SEQ], torch.where(seen, lse / torch.tensor(2.0).log(), float("inf")))
    delta = (out * d_out).sum(-1).transpose(1, 2) - d_lse
    torch.testing.assert_close(rows[..., 1, :SEQ], torch.where(seen, delta, 0.0), atol=1e-5, rtol=1e-5)
    assert torch.equal(rows[..., 2, :].view(torch.int32)[..., :SEQ], data.expand(-1, HEADS, -1))
    assert torch.isposinf(rows[..., 0, SEQ:]).all() and not rows[..., 1:, SEQ:].any()


@pytest.mark.parametrize(("num_lists", "num_n"), [(2, 1), (2, 5), (1, 260)])
def test_long_tiles_come_first_and_both_kinds_from_left_to_right(num_lists, num_n):
    counts = torch.randint(0, 9, (num_lists, num_n), dtype=torch.int32)
    counts[0, num_n // 2] = 3000
    order = torch.full_like(counts, -1)
    counter = torch.zeros(2, dtype=torch.int32)
    made = torch.randn(1, 40, 1, DIM)
    lse = torch.randn(1, 1, 40)
    stats, dq_sum = torch.empty(1, 1, 2, 2, ROWS), torch.empty(1, 1, 64, DIM)
    heads, share = 4, 64
    prepare[(2, 1, 1)](
        made, made, lse, lse, stats, dq_sum, counter, counter, counts, order, *made.stride()[:3], *made.stride()[:3],
        0, 0, 40, 1, num_lists, num_n, heads, share, True, False, False, DIM, ROWS,
    )  # fmt: skip
    most = 0
    for row, found in zip(counts.tolist(), order.tolist(), strict=True):
        limit = sum(row) * heads // share
        wanted = sorted(range(num_n), key=lambda column: (row[column] <= limit, column))
        assert found == wanted
        most = max(most, sum(count > limit for count in row))
    assert counter.tolist() == [0, most]


def test_dq_is_scaled_and_rounded():
    total = torch.randn(BATCH, HEADS, NUM_M * ROWS, DIM)
    dq = torch.full((BATCH, SEQ + 3, HEADS, DIM), 5.0, dtype=torch.float16)[:, :SEQ]
    finish[(NUM_M, HEADS, BATCH)](total, dq, *dq.stride()[:3], 0.5, SEQ, HEADS, DIM, ROWS)
    assert torch.equal(dq, (total[:, :, :SEQ] * 0.5).transpose(1, 2).half())
