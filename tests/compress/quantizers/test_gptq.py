"""The GPTQ solver against the textbook update, and where H is degenerate."""

from __future__ import annotations

import pytest
import torch

from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.ops import formats
from hone.solvers.sweep import solve, upper_factor


def problem(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64):
    """Weights [N, K] and the Hessian of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=dtype)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=dtype) @ mixing
    x *= torch.rand(columns, generator=generator, dtype=dtype) * 2 + 0.05
    return torch.randn(rows, columns, generator=generator, dtype=dtype), x.T @ x / len(x)


def textbook(weights, hessian, scales, bits, damping, keep=None):
    """GPTQ as its paper tells it: round a column, update all others by the inverse Hessian, remove the column from it."""
    low, high = formats.code_range(bits)
    weights, rows, columns = weights.clone(), *weights.shape
    inverse = torch.linalg.inv(hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype))
    codes = torch.zeros(rows, columns, dtype=torch.int8)
    for column in range(columns):
        scale = scales[:, column // (columns // scales.shape[1])]
        code = (weights[:, column] / scale).round().clamp(low, high)
        if keep is not None:
            code = code * keep[:, column]
        codes[:, column] = code.to(torch.int8)
        error = (weights[:, column] - code * scale) / inverse[column, column]
        weights -= error.outer(inverse[column])
        inverse = inverse - inverse[:, column].outer(inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0  # gone; only keeps later divisions from 0 / 0
    return codes


@pytest.mark.parametrize(("rows", "columns", "groups"), [(5, 16, 1), (8, 64, 2), (3, 130, 13), (7, 96, 3)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_equal_the_textbook_update(rows: int, columns: int, groups: int, bits: int) -> None:
    weights, hessian = problem(rows, columns, seed=columns)
    scales = weights.view(rows, groups, -1).abs().amax(-1) / (1 << (bits - 1))
    scales[::2] *= -1
    factor = upper_factor(hessian, 0.01)
    assert torch.equal(solve(weights, factor, scales, bits), textbook(weights, hessian, scales, bits, 0.01))


def test_pruned_weights_stay_zero_and_their_error_is_carried_along() -> None:
    weights, hessian = problem(6, 70, seed=3)
    keep = torch.rand(6, 70, generator=torch.Generator().manual_seed(0)) > 0.5
    scales = weights.abs().amax(-1, keepdim=True) / 8
    codes = solve(weights, upper_factor(hessian, 0.01), scales, 4, keep=keep)
    assert (codes[~keep] == 0).all()
    assert torch.equal(codes, textbook(weights, hessian, scales, 4, 0.01, keep))


def test_column_order_is_a_permutation_of_the_problem() -> None:
    weights, hessian = problem(4, 48, seed=1)
    scales = weights.view(4, 3, 16).abs().amax(-1) / 8
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    codes = solve(weights, upper_factor(hessian[order][:, order], 0.01), scales, 4, order=order)
    wide = scales.repeat_interleave(16, dim=1)[:, order]
    expected = textbook(weights[:, order], hessian[order][:, order], wide, 4, 0.01)
    assert torch.equal(codes[:, order], expected)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_output_error_is_below_round_to_nearest_on_the_same_grid(bits: int, act_order: bool) -> None:
    weights, hessian = problem(32, 64, seed=bits)
    errors = {}
    for kind, options in (("rtn", {}), ("gptq", {"act_order": act_order})):
        matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
        options = {"kind": kind, "bits": bits, "group_size": 32, "scale": "absmax", **options}
        QUANTIZERS.read(options).apply(matrix)
        errors[kind] = matrix.errors().output
    assert errors["gptq"] < 0.8 * errors["rtn"]


def test_columns_that_no_input_touched_are_rounded_to_nearest() -> None:
    weights, hessian = problem(4, 32, seed=0)
    dead = [0, 5, 31]
    hessian[dead] = 0
    hessian[:, dead] = 0
    matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
    QUANTIZERS.read({"kind": "gptq", "bits": 4, "group_size": 32, "scale": "absmax"}).apply(matrix)
    nearest = formats.quantize(weights, matrix.stored.scales, 4)
    assert torch.equal(matrix.stored.codes[:, dead], nearest[:, dead]) and not matrix.notes


def test_a_hessian_of_rank_one_is_damped_and_solved() -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    matrix = Matrix("w", weights, torch.float32, {"hessian": x.T @ x})
    QUANTIZERS.read({"kind": "gptq", "bits": 4, "group_size": 32}).apply(matrix)
    plain = Matrix("w", weights, torch.float32, {"hessian": x.T @ x})
    QUANTIZERS.read({"kind": "rtn", "bits": 4, "group_size": 32}).apply(plain)
    assert matrix.errors().output < plain.errors().output


def test_damping_is_raised_and_said() -> None:
    weights, hessian = problem(4, 32, seed=0)
    hessian -= 0.05 * hessian.diagonal().mean() * torch.eye(32)  # has negative eigenvalues
    assert upper_factor(hessian, 0.01) is None
    matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
    QUANTIZERS.read({"kind": "gptq", "bits": 4, "group_size": 32}).apply(matrix)
    assert matrix.notes == ["damping raised to 0.1"]


def test_a_hopeless_hessian_is_rounded_to_nearest_and_said() -> None:
    weights, _ = problem(4, 32, seed=0)
    hessian = torch.full((32, 32), 5.0, dtype=torch.float64).fill_diagonal_(1.0)
    matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
    QUANTIZERS.read({"kind": "gptq", "bits": 4, "group_size": 32}).apply(matrix)
    assert "rounded to nearest" in matrix.notes[0]
    assert torch.equal(matrix.stored.codes, formats.quantize(weights, matrix.stored.scales, 4))


def test_all_zero_inputs_and_weights_give_zero_error() -> None:
    matrix = Matrix("w", torch.zeros(4, 32), torch.float32, {"hessian": torch.zeros(32, 32)})
    QUANTIZERS.read({"kind": "gptq", "bits": 4, "group_size": 16}).apply(matrix)
    assert (matrix.weight == 0).all() and matrix.errors().output == 0.0
