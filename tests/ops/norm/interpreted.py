"""Norm kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops import rms_norm
from tests.ops.agree import agree, graded


@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 5, 16), (2, 4096)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(shape: tuple[int, ...], with_residual: bool) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1], requires_grad=True)
    weight = torch.rand(shape[-1], requires_grad=True)
    residual = torch.randn(shape, requires_grad=True)

    def run(backend: str) -> list[torch.Tensor]:
        x = heads[..., 1:-1, :]  # heads of a fused projection: rows in runs
        if not with_residual:
            return graded(rms_norm(x, weight, 1e-5, backend=backend), heads, weight)
        y, summed = rms_norm(x, weight, 1e-5, residual, backend=backend)
        return graded(torch.cat((y, summed * 2)), heads, weight, residual)

    agree(run, "torch")


def test_norm_codes() -> None:
    x, residual = torch.randn(2, 9, 24)
    weight = torch.rand(24)
    agree(lambda backend: rms_norm(x, weight, 1e-5, residual, "int8", backend=backend), close=1e-6)
    # The interpreter cuts float8 where the hardware rounds, so only the scales can be compared.
    agree(lambda backend: rms_norm(x, weight, 1e-5, residual, "fp8", backend=backend)[1:])
