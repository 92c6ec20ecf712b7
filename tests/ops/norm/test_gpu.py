"""Norm kernels on a GPU against float64, poisoned outputs, two runs bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hone.ops import rms_norm
from tests.ops.gpu_case import DTYPES, as_good, error, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (33, 8192), (7, 100), (3, 5, 8, 128), (2, 16384), (20011, 64)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    heads = torch.randn(*shape[:-2], shape[-2] + 3, shape[-1], device="cuda").to(dtype)
    weight = torch.rand(shape[-1], device="cuda").to(dtype)
    residual = torch.randn(shape, device="cuda").to(dtype)

    def alone(backend: str) -> Callable[..., Tensor]:
        return lambda h, w: rms_norm(h[..., 1:-2, :], w, 1e-5, backend=backend)

    def added(backend: str) -> Callable[..., Tensor]:
        return lambda h, w, r: torch.cat(rms_norm(h[..., 1:-2, :], w, 1e-5, r, backend=backend))

    as_good(alone, (heads, weight))
    as_good(added, (heads, weight, residual))
    for kind in ("fp8", "int8"):
        poison()
        ours, plain = (
            rms_norm(heads[..., 1:-2, :], weight, 1e-5, residual, kind, backend=backend)
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(ours[1], plain[1])
        assert torch.equal(ours[2], plain[2])
        assert (ours[0].float() != plain[0].float()).float().mean() < 2e-3
        assert error(ours[0].float() * ours[1], (plain[0].float() * plain[1]).double()) < 2e-3
