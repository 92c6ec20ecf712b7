"""AutoRound: its steps against autograd, its result against every choice of rounding up or down."""

from __future__ import annotations

import itertools

import pytest
import torch

from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.ops import formats
from hone.ops.rounding.integer_grid import Grid, find_grid
from hone.solvers.descent import Descent
from tests.compress.quantizers.test_gptq import problem


class Through(torch.autograd.Function):
    """Rounding with slope one."""

    @staticmethod
    def forward(context, x):
        return x.round()

    @staticmethod
    def backward(context, slope):
        return slope


def output_error(weights: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Squared error of every row's outputs, [N]."""
    change = values - weights
    return ((change @ hessian) * change).sum(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_steps_are_the_signs_of_autograds_gradient(bits: int, symmetric: bool) -> None:
    weights, hessian = problem(5, 32, seed=bits)
    start = find_grid(weights, bits, 16, "search", torch.float64, symmetric=symmetric)
    descent = Descent(weights, hessian, start, bits)
    low, high = formats.code_range(bits)
    steps, zeros = start.wide(torch.float64)
    for _ in range(3):
        offset = descent.offset.clone().requires_grad_()
        change = descent.change.clone().requires_grad_()
        before = offset.detach().clone(), change.detach().clone()
        scale = steps * (1 + change)
        rounded = Through.apply(weights.view(5, 2, 16) / scale + offset + zeros)
        # As clamp, which from torch 2.14 on has slope zero at its ends and had one before.
        codes = torch.where((rounded >= low) & (rounded <= high), rounded, rounded.detach().clamp(low, high))
        values = ((codes - zeros) * scale).view(5, 32)
        output_error(weights, values, hessian).sum().backward()
        descent.turn(0.05, learn_scales=True)
        inside = (codes.detach() > low) & (codes.detach() < high)
        expected = (before[0] - 0.05 * offset.grad.sign()).clamp(-0.5, 0.5)
        assert torch.equal(descent.offset[inside], expected[inside])
        free = (weights.view(5, 2, 16) / scale + offset + zeros).detach().round()
        if bool(((free >= low) & (free <= high)).all()):
            assert torch.equal(descent.change, before[1] - 0.05 * change.grad.sign())
    assert bool(descent.offset.abs().max() > 0.1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"learn_scales": False}, {"symmetric": False}, {"iters": 1}])
def test_no_row_is_worse_than_its_start_and_most_are_better(bits: int, options: dict) -> None:
    weights, hessian = problem(32, 64, seed=bits)
    errors, shared = {}, {"bits": bits, "group_size": 32, "scale": "search"}
    for kind, more in (("rtn", {}), ("autoround", options)):
        matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
        symmetric = {"symmetric": options.get("symmetric", True)}
        QUANTIZERS.read({"kind": kind, **shared, **more, **symmetric}).apply(matrix)
        errors[kind] = output_error(weights, matrix.weight, hessian)
    assert (errors["autoround"] <= errors["rtn"] * (1 + 1e-9)).all()
    if options.get("iters") != 1:
        assert errors["autoround"].sum() < 0.85 * errors["rtn"].sum()


def test_it_goes_most_of_the_way_to_the_best_of_all_roundings() -> None:
    nearest = learned = best = 0.0
    for seed in range(4, 8):
        weights, hessian = problem(24, 8, seed)
        start = find_grid(weights, 4, 8, "absmax", torch.float64)
        down, least = (weights / start.scales).floor(), torch.full((24,), float("inf"), dtype=torch.float64)
        for up in itertools.product((0.0, 1.0), repeat=8):
            codes = (down + torch.tensor(up, dtype=torch.float64)).clamp(-8, 7)
            least = torch.minimum(least, output_error(weights, codes * start.scales, hessian))
        descent = Descent(weights, hessian, start, 4)
        for turn in range(400):
            descent.turn((1 - turn / 400) / 400, learn_scales=False)
        codes, found = descent.best()
        assert torch.equal(found.scales, start.scales)
        errors = output_error(weights, codes * start.scales, hessian)
        assert (errors >= least * (1 - 1e-9)).all()
        codes = (weights / start.scales).round().clamp(-8, 7)
        nearest += float(output_error(weights, codes * start.scales, hessian).sum())
        learned, best = learned + float(errors.sum()), best + float(least.sum())
    assert nearest - learned > 0.6 * (nearest - best)


def test_pruned_weights_stay_zero_and_the_others_make_up_for_them() -> None:
    weights, hessian = problem(16, 64, seed=1)
    keep = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    for symmetric in (True, False):
        errors = {}
        for kind in ("rtn", "autoround"):
            matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
            matrix.prune(keep)
            step = {"kind": kind, "group_size": 32, "scale": "search", "symmetric": symmetric}
            QUANTIZERS.read(step).apply(matrix)
            assert (matrix.weight[~keep] == 0).all()
            errors[kind] = matrix.errors().output
        assert errors["autoround"] < errors["rtn"]


def test_scales_of_both_signs_are_learned_towards_their_own_side() -> None:
    weights, hessian = problem(16, 32, seed=2)
    start = find_grid(weights, 3, 32, "signed", torch.float64)
    assert (start.scales < 0).any() and (start.scales > 0).any()
    mirrored = Descent(weights, hessian, Grid(-start.scales), 3)
    descent = Descent(-weights, hessian, start, 3)
    for turn in range(20):  # the same problem twice: every weight and scale with its sign changed
        for one in (descent, mirrored):
            one.turn(0.05 * (1 - turn / 20), learn_scales=True)
    assert torch.equal(descent.best()[1].scales, -mirrored.best()[1].scales)
    assert torch.equal(descent.best()[0], mirrored.best()[0])
