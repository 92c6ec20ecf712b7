"""The sweep of GPTQ against the loop of its paper, in the paper's letters."""

from __future__ import annotations

import pytest
import torch

from hone.ops.rounding.integer_grid import find_scales
from hone.solvers.sweep import damped_factor, reference, solve


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("shape", [(5, 32), (3, 96)])
def test_the_sweep_rounds_as_the_papers_loop(shape: tuple[int, int], bits: int) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(columns + bits)
    W = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(3 * columns, columns, generator=generator, dtype=torch.float64)
    H = (x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)).T
    H = H @ H.T / len(x)
    scales = find_scales(W, bits, 16, "absmax", torch.float64)
    R, notes = damped_factor(H, 0.01, "not reached")
    eye = torch.eye(columns, dtype=torch.float64)  # of float32, what is added would be off by half the bound
    assert notes == () and torch.allclose(R @ R.T, H + 0.01 * H.diagonal().mean() * eye, rtol=1e-9)
    wanted = reference(W, H, scales, bits, 0.01)
    assert torch.equal(solve(W, R, scales, bits), wanted)
    nearest = (W.view(rows, -1, 16) / scales[..., None]).round().view(W.shape).to(torch.int8)
    assert not torch.equal(wanted, nearest)


def test_a_matrix_without_a_factor_is_rounded_to_nearest_with_a_note() -> None:
    H = torch.full((4, 4), float("nan"), dtype=torch.float64)
    H.fill_diagonal_(1.0)
    R, notes = damped_factor(H, 0.01, "rounded to nearest")
    assert notes == ("no Cholesky factor at any damping: rounded to nearest",)
    assert torch.equal(R, torch.eye(4, dtype=torch.float64))
