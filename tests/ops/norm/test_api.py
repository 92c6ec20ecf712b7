"""Norm with residual and codes against its definition, and its gradients."""

from __future__ import annotations

import pytest
import torch

from hone.ops import rms_norm
from hone.ops.norm import reference

F64 = torch.float64


def test_the_residual_is_added_normed_and_returned() -> None:
    x, residual = torch.randn(2, 3, 5, 16, dtype=F64)
    weight = torch.rand(16, dtype=F64)
    y, summed = rms_norm(x, weight, 1e-3, residual)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(y, reference.rms_norm(x + residual, weight, 1e-3))
    leaves = [one.clone().requires_grad_() for one in (x, weight, residual)]
    assert torch.autograd.gradcheck(lambda a, b, c: rms_norm(a, b, 1e-3, c), leaves)


@pytest.mark.parametrize(("kind", "largest", "step"), [("fp8", 448.0, 1 / 16), ("int8", 127.0, 1 / 254)])
def test_codes_times_scales_are_the_norm(kind: str, largest: float, step: float) -> None:
    x, residual = torch.randn(2, 4, 32)
    x[0, 3] = 1000.0
    weight = torch.rand(32) + 0.5
    codes, scales, summed = rms_norm(x, weight, 1e-5, residual, kind)
    y = reference.rms_norm(summed, weight, 1e-5)
    assert scales.shape == (4, 1) and scales.dtype == torch.float32
    torch.testing.assert_close(scales * largest, y.abs().amax(-1, keepdim=True))
    error = (codes.float() * scales - y).abs()
    bound = (y.abs() if kind == "fp8" else y.abs().amax(-1, keepdim=True)) * step
    assert (error <= bound + scales * 2**-9).all()
    assert codes.float().abs().amax(-1).tolist() == [largest] * 4
    zero, scales = rms_norm(torch.zeros(2, 32), weight, 1e-5, quantize=kind)
    assert not zero.float().any() and torch.isfinite(scales).all()
