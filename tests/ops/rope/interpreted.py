"""Rotary kernels in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops import rope, rope_write
from tests.ops.agree import agree, graded


@pytest.mark.parametrize("angles", [(2, 5), (5,), (2, 1)])
def test_rope(angles: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, 10, 16, requires_grad=True)
    cos, sin = torch.randn(2, *angles, 1, 8)
    agree(lambda backend: graded(rope(x[:, :, 2:8], cos, sin, backend=backend), x), "torch")
    inner = x.detach().clone()
    rope(inner[:, :, 2:8], cos, sin, in_place=True, backend="triton")
    torch.testing.assert_close(inner[:, :, 2:8], rope(x[:, :, 2:8], cos, sin).detach())
    assert torch.equal(inner[:, :, 8:], x[:, :, 8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_rope_write(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 8, 16)
    cos, sin = torch.randn(2, 6, 1, 8)
    slots = torch.tensor([4, 5, 3, 10, 9, 12])

    def run(backend: str) -> list[torch.Tensor]:
        turned, (k_pages, v_pages) = qkv.clone(), torch.full((2, 4, 2, 4, 16), 7.0).to(dtype)
        q, k, v = turned.split([4, 2, 2], dim=1)
        scales = torch.full((2, 4, 2, 4), 3.0) if dtype != torch.float32 else (None, None)
        rope_write(q, k, v, cos, sin, k_pages, v_pages, slots // 4, slots % 4, *scales, backend=backend)
        if dtype == torch.float32:
            return [turned, k_pages, v_pages]
        # The interpreter cuts float8 where the hardware rounds: its codes cannot be compared.
        return [turned, *scales] if dtype != torch.int8 else [turned, *scales, k_pages, v_pages]

    agree(run)


@pytest.mark.parametrize("width", [16, 12])
def test_rope_write_with_norms(width: int) -> None:
    qkv, norms = torch.randn(6, 8, width) * 3, torch.rand(2, width) + 0.5
    cos, sin = torch.randn(2, 6, 1, width // 2)
    slots = torch.tensor([4, 5, 3, 10, 9, 12])

    def run(backend: str) -> list[torch.Tensor]:
        turned, pages = qkv.clone(), torch.full((2, 4, 2, 4, width), 7.0)
        q, k, v = turned.split([4, 2, 2], dim=1)
        places = slots // 4, slots % 4
        rope_write(q, k, v, cos, sin, *pages, *places, q_norm=norms[0], k_norm=norms[1], eps=1e-2, backend=backend)
        return [turned, pages]

    agree(run)


@pytest.mark.parametrize("shape", [(2,), (4, 2)])
def test_rope_write_with_fixed_scales(shape: tuple[int, ...]) -> None:
    """Beyond the largest code, too; scales stay as they are."""
    qkv, fixed = torch.randn(6, 8, 16), torch.rand(2, *shape) * 0.02 + 0.01
    cos, sin = torch.randn(2, 6, 1, 8)
    slots = torch.tensor([4, 5, 3, 10, 9, 12])

    def run(backend: str) -> list[torch.Tensor]:
        turned, pages, scales = qkv.clone(), torch.full((2, 4, 2, 4, 16), 7, dtype=torch.int8), fixed.clone()
        q, k, v = turned.split([4, 2, 2], dim=1)
        rope_write(q, k, v, cos, sin, *pages, slots // 4, slots % 4, *scales, backend=backend)
        assert torch.equal(scales, fixed) and pages.min() == -128
        return [turned, pages]

    agree(run)
