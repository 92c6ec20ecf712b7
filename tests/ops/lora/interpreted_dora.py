"""The kernels of DoRA's lengths in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch

from hone.ops.lora.dora import _flow, _stretched


@pytest.mark.parametrize("shape", [(70, 300), (3, 16)])
def test_stretched_rows_and_their_gradient(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    out, upstream = torch.randn(2, *shape, generator=generator)
    stretched = torch.rand(shape[1], generator=generator)
    ours, plain = out.clone(), out.clone()
    _stretched(ours, stretched, "triton")
    _stretched(plain, stretched, "reference")
    torch.testing.assert_close(ours, plain)
    wide = torch.cat([upstream, upstream], 1)[:, : shape[1]]  # rows with a gap between them
    for mine, theirs in zip(*(_flow(wide, out, stretched, name) for name in ("triton", "reference")), strict=True):
        torch.testing.assert_close(mine, theirs)
