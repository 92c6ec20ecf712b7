"""HQQ against a loop over numbers, and what it is for: groups with outliers."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.compress.quantizers.hqq import HQQ
from hone.ops.rounding import integer_grid as grid
from hone.solvers.half_quadratic import fit, shrink


def groups_of(rows: int = 3, num_groups: int = 2, size: int = 16) -> torch.Tensor:
    """Groups [n, G, g], each with one outlier."""
    groups = torch.randn(rows, num_groups, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups[..., 3] *= 4
    return groups


def by_hand(weights: list[float], bits: int, scale: float, zero: int, symmetric: bool, iters: int) -> tuple[float, int]:
    """One group as the paper tells it, with the scale fitted too; the best turn by the sum of |error|^0.7."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    beta, best, least = 10.0, (scale, zero), None
    for _ in range(iters + 1):
        codes = [min(max(round(w / scale + zero), low), high) for w in weights]
        errors = [w - (q - zero) * scale for w, q in zip(weights, codes, strict=True)]
        size = sum(abs(e) ** 0.7 for e in errors)
        if least is None or size < least:
            best, least = (scale, zero), size
        outliers = []
        for e in errors:
            x = e / scale
            most = abs(x) - abs(x) ** (0.7 - 1) / beta if x else 0.0
            outliers.append((1 if x > 0 else -1) * max(most, 0.0) * scale)
        aims = [w - o for w, o in zip(weights, outliers, strict=True)]
        if not symmetric:
            shift = sum(q - a / scale for q, a in zip(codes, aims, strict=True)) / len(codes)
            zero = min(max(round(shift), low), high)
        norm = sum((q - zero) ** 2 for q in codes)
        if norm:
            scale = sum((q - zero) * a for q, a in zip(codes, aims, strict=True)) / norm
        beta *= 1.01
    return best


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_grids_are_those_of_a_loop_over_numbers(bits: int, symmetric: bool) -> None:
    groups = groups_of()
    hqq = HQQ(bits=bits, symmetric=symmetric)
    start = grid.find_grid(groups.flatten(1), bits, 16, "absmax", torch.float64, symmetric=symmetric)
    found = fit(groups, start, bits, iters=hqq.iters, norm=hqq.norm, beta=hqq.beta, kappa=hqq.kappa)
    for row in range(3):
        for group in range(2):
            zero = 0 if symmetric else int(start.zero_points[row, group])
            first = float(start.scales[row, group])
            scale, point = by_hand(groups[row, group].tolist(), bits, first, zero, symmetric, hqq.iters)
            assert float(found.scales[row, group]) == pytest.approx(scale, rel=1e-9)
            assert symmetric or int(found.zero_points[row, group]) == point


def test_shrink_of_the_absolute_value_is_the_soft_threshold() -> None:
    error = torch.tensor([-2.0, -0.1, 0.0, 0.05, 3.0])
    assert shrink(error, 10.0, 1.0).tolist() == pytest.approx([-1.9, 0.0, 0.0, 0.0, 2.9])
    assert torch.equal(shrink(torch.zeros(2), 10.0, 0.7), torch.zeros(2))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["absmax", "search"])
def test_no_group_is_worse_than_its_start(symmetric: bool, scale: str) -> None:
    weights, errors = groups_of(32, 4, 32).flatten(1).float(), {}
    for kind in ("rtn", "hqq"):
        matrix = Matrix("w", weights, torch.float32)
        step = {"kind": kind, "bits": 3, "group_size": 32, "scale": scale, "symmetric": symmetric}
        QUANTIZERS.read(step).apply(matrix)
        errors[kind] = (matrix.weight - weights).abs().pow(0.7).view(32, 4, 32).sum(-1)
    assert (errors["hqq"] <= errors["rtn"] * (1 + 1e-6)).all()
    assert errors["hqq"].sum() < (0.93 if scale == "absmax" else 0.97) * errors["rtn"].sum()


def test_rows_are_chunked_without_changing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, found = groups_of(33, 2, 16).flatten(1).float(), []
    for size in (1 << 20, 100):
        monkeypatch.setitem(grid._CHUNK, "cpu", size)
        matrix = Matrix("w", weights, torch.float32)
        QUANTIZERS.read({"kind": "hqq", "group_size": 16, "symmetric": False}).apply(matrix)
        found.append(matrix.stored)
    assert torch.equal(found[0].scales, found[1].scales) and torch.equal(found[0].codes, found[1].codes)
    assert torch.equal(found[0].zero_points, found[1].zero_points)


def test_two_symmetric_bits_are_refused(family_folder, compress) -> None:
    with pytest.raises(SpecError, match="shifts every output"):
        compress(family_folder("llama"), {"kind": "hqq", "bits": 2, "group_size": 32})
