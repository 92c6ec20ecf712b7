"""The reference of attention against its definition, written another way."""

from __future__ import annotations

import math

import pytest
import torch

from hone.ops.attention import masks, reference

F64 = torch.float64


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attend_is_the_definition(window: int | None) -> None:
    q, k, v = torch.randn(2, 6, 4, 8, dtype=F64), *torch.randn(2, 2, 6, 2, 8, dtype=F64)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    out, lse = reference.attend(q, k, v, masks.documents(ids, window), scale=0.7)
    for row, place, head in [(0, 0, 0), (0, 4, 3), (0, 5, 1), (1, 5, 2), (1, 3, 0)]:
        seen = [
            other
            for other in range(place + 1)
            if ids[row, other] == ids[row, place] and (window is None or place - other < window)
        ]
        scores = [math.exp(0.7 * float(q[row, place, head] @ k[row, other, head // 2])) for other in seen]
        want = sum(score * v[row, other, head // 2] for score, other in zip(scores, seen)) / sum(scores)
        torch.testing.assert_close(out[row, place, head], want)
        torch.testing.assert_close(lse[row, head, place], torch.tensor(math.log(sum(scores)), dtype=F64))
