"""The interpreter is what runs in these files, and it runs kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hone.ops.compat import INTERPRETED


@triton.jit
def _add_one(x, y, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, tl.load(x + places, mask=places < size) + 1, mask=places < size)


def test_kernels_run_on_cpu_tensors():
    assert INTERPRETED
    x, y = torch.randn(13), torch.full((16,), 7.0)
    _add_one[(2,)](x, y, 13, BLOCK=8)
    torch.testing.assert_close(y[:13], x + 1)
    assert (y[13:] == 7).all()
