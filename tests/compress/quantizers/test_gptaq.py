"""GPTAQ against the paper's update of one column after another with explicit inverses, and against GPTQ."""

from __future__ import annotations

import pytest
import torch

from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.ops import formats
from hone.solvers.sweep import solve, towards, upper_factor


def problem(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [N, K], inputs X and dense inputs D [K, T]: D is X with some of it replaced, float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixing = random(columns, columns)
    inputs = mixing @ random(columns, 8 * columns)
    dense = inputs + 0.4 * mixing @ random(columns, columns) @ inputs / columns
    return random(rows, columns), inputs, dense


def statistics_of(inputs: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
    count = inputs.shape[1]
    return {"hessian": inputs @ inputs.T / count, "cross": (dense - inputs) @ inputs.T / count}


def paper(weights, hessian, cross, scales, bits, damping, keep=None):
    """Algorithm 1 of arXiv:2504.02692: the error of a column and its part of the inputs' change go to the columns after it."""
    low, high = formats.code_range(bits)
    weights, columns = weights.clone(), weights.shape[1]
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    moved = torch.triu(cross @ upper.T, 1) @ upper
    codes = torch.zeros(weights.shape, dtype=torch.int8)
    for column in range(columns):
        scale = scales[:, column // (columns // scales.shape[1])]
        code = (weights[:, column] / scale).round().clamp(low, high)
        code = code if keep is None else code * keep[:, column]
        codes[:, column] = code.to(torch.int8)
        value = weights[:, column].clone()
        error = (value - code * scale) / upper[column, column]
        later = slice(column + 1, columns)
        weights[:, later] += value.outer(moved[column, later]) - error.outer(upper[column, later])
    return codes


@pytest.mark.parametrize(("rows", "columns", "groups"), [(5, 16, 1), (8, 64, 2), (3, 130, 13)])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("pruned", [False, True])
def test_codes_equal_the_update_of_the_paper(rows: int, columns: int, groups: int, bits: int, pruned: bool) -> None:
    weights, inputs, dense = problem(rows, columns, seed=columns)
    found = statistics_of(inputs, dense)
    scales = weights.view(rows, groups, -1).abs().amax(-1) / (1 << (bits - 1))
    keep = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) > 0.4 if pruned else None
    aims, factor = towards(weights, upper_factor(found["hessian"], 0.01), found["cross"])
    expected = paper(weights, found["hessian"], found["cross"], scales, bits, 0.01, keep)
    assert torch.equal(solve(aims, factor, scales, bits, keep=keep), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_are_nearer_to_those_of_the_dense_inputs(symmetric: bool) -> None:
    weights, inputs, dense = problem(32, 64)
    wanted, lost = weights @ dense, {}
    for alpha in (0.0, 0.25, 1.0):
        matrix = Matrix("w", weights, torch.float32, statistics_of(inputs, dense))
        step = {"kind": "gptaq", "bits": 4, "group_size": 32, "symmetric": symmetric, "alpha": alpha}
        QUANTIZERS.read(step).apply(matrix)
        lost[alpha] = float((matrix.weight @ inputs - wanted).norm() / wanted.norm())
    assert lost[1.0] < 0.85 * lost[0.0] and lost[1.0] < lost[0.25] < lost[0.0], lost


@pytest.mark.parametrize("act_order", [True, False])
def test_without_a_change_of_the_inputs_it_is_gptq(act_order: bool) -> None:
    weights, inputs, dense = problem(8, 64)
    given = {"bits": 3, "group_size": 32, "act_order": act_order}
    found = []
    for step, other in (
        ({"kind": "gptq"}, dense),
        ({"kind": "gptaq"}, inputs),
        ({"kind": "gptaq", "alpha": 0.0}, dense),
        ({"kind": "gptaq"}, dense),
    ):
        matrix = Matrix("w", weights, torch.float32, statistics_of(inputs, other))
        QUANTIZERS.read({**step, **given}).apply(matrix)
        found.append(matrix.stored.codes)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_a_change_that_cannot_be_made_up_for_is_said() -> None:
    weights, inputs, dense = problem(8, 64)
    found, codes = statistics_of(inputs, dense), []
    for kind, cross in (("gptq", found["cross"]), ("gptaq", torch.full((64, 64), 1e300, dtype=torch.float64))):
        matrix = Matrix("w", weights, torch.float32, {**found, "cross": cross})
        QUANTIZERS.read({"kind": kind, "group_size": 32}).apply(matrix)
        codes.append(matrix.stored.codes)
    assert torch.equal(*codes) and "too large" in matrix.notes[0]
