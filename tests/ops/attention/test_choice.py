"""Where attend runs."""

from __future__ import annotations

import pytest
import torch

from hone.ops.dispatch import Where, choose

CPU = Where("cpu", triton=(3, 6))
HOPPER = Where("cuda", (9, 0), 132, (3, 6))
AMPERE = Where("cuda", (8, 0), 108, (3, 6))
BLACKWELL = Where("cuda", (10, 0), 148, (3, 7))
OLD = Where("cuda", (9, 0), 132, (3, 2))
USUAL = {"dtype": torch.bfloat16, "head_dim": 128, "v_dim": 128, "block": 0, "dense": True, "plain": True}


@pytest.mark.parametrize(
    ("where", "changed", "backend"),
    [
        (CPU, {}, "torch"),
        (CPU, {"plain": False}, "reference"),
        (HOPPER, {}, "gluon"),
        (HOPPER, {"plain": False, "dtype": torch.float16}, "gluon"),
        (HOPPER, {"head_dim": 64, "v_dim": 64}, "gluon"),
        (HOPPER, {"head_dim": 64, "v_dim": 64, "dense": False}, "gluon"),
        (HOPPER, {"head_dim": 192}, "cudnn"),
        (HOPPER, {"head_dim": 192, "dense": False}, "triton"),
        (HOPPER, {"head_dim": 128, "v_dim": 64}, "triton"),
        (HOPPER, {"head_dim": 80, "v_dim": 80}, "triton"),
        (HOPPER, {"head_dim": 96, "v_dim": 96}, "cudnn"),
        (HOPPER, {"head_dim": 256, "v_dim": 256, "plain": False}, "cudnn"),
        (HOPPER, {"head_dim": 256, "v_dim": 256, "dense": False}, "triton"),
        (HOPPER, {"head_dim": 100, "v_dim": 100}, "triton"),
        (HOPPER, {"head_dim": 32, "v_dim": 32}, "triton"),
        (AMPERE, {"head_dim": 96, "v_dim": 96}, "triton"),
        (HOPPER, {"block": 64}, "triton"),
        (HOPPER, {"block": 256}, "gluon"),
        (HOPPER, {"dtype": torch.float32}, "torch"),
        (HOPPER, {"dtype": torch.float64, "plain": False}, "reference"),
        (HOPPER, {"head_dim": 576}, "torch"),
        (AMPERE, {}, "triton"),
        (BLACKWELL, {}, "triton"),
        (OLD, {}, "reference"),
    ],
)
def test_attend(where: Where, changed: dict, backend: str) -> None:
    choice = choose("attend", where, **{**USUAL, **changed})
    assert choice.backend == backend
    assert choice.reason


@pytest.mark.parametrize(
    ("where", "changed", "backend"),
    [
        (HOPPER, {}, "gluon"),
        (HOPPER, {"deterministic": True}, "triton"),
        (HOPPER, {"head_dim": 96, "v_dim": 96}, "triton"),
        (HOPPER, {"head_dim": 96, "v_dim": 96, "dense": True}, "cudnn"),
        (HOPPER, {"head_dim": 192, "dense": True}, "cudnn"),
        (HOPPER, {"head_dim": 192, "dense": True, "deterministic": True}, "triton"),
        (HOPPER, {"head_dim": 128, "v_dim": 64, "dense": True}, "triton"),
        (HOPPER, {"head_dim": 96, "v_dim": 96, "dense": True, "deterministic": True}, "triton"),
        (AMPERE, {}, "triton"),
    ],
)
def test_attend_backward(where: Where, changed: dict, backend: str) -> None:
    case = {"head_dim": 128, "v_dim": 128, "block": 0, "dense": False, "deterministic": False, **changed}
    assert choose("attend_backward", where, **case).backend == backend
