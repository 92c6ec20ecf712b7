"""SparseGPT alone and with GPTQ in one sweep, against the papers' update with an explicit inverse; and what its options do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import PRUNERS, QUANTIZERS
from hone.compress.matrix import Matrix
from hone.model.hf import load
from hone.ops import formats
from hone.ops.rounding.api import BLOCK
from tests.compress.conftest import perplexity
from tests.compress.quantizers.test_gptq import problem

DAMPING = 0.01
PATTERNS = {"none": None, "2:4": (2, 4), "4:8": (4, 8)}


def eliminated(inverse: torch.Tensor, column: int) -> torch.Tensor:
    """The inverse of H without `column`."""
    return inverse - inverse[:, column].outer(inverse[column]) / inverse[column, column]


def choose(weights: torch.Tensor, inverse: torch.Tensor, begin: int, end: int, kept, sparsity: float, pattern) -> None:
    """Sets `kept` False for the cheapest weights of columns begin .. end - 1: w^2 / [H^-1]_jj once the columns before j are gone."""
    rows, cost = len(weights), {}
    for column in range(begin, end):
        for row in range(rows):
            alive = bool(kept[row, column])
            cost[row, column] = float(weights[row, column] ** 2 / inverse[column, column]) if alive else -1.0
        inverse = eliminated(inverse, column)
    count = round(sparsity * end) - round(sparsity * begin) if pattern is None else pattern[1] - pattern[0]
    for row in range(rows):
        for column in sorted(range(begin, end), key=lambda column: cost[row, column])[:count]:
            kept[row, column] = False


def textbook(weights, hessian, sparsity, pattern, keep=None, scales=None, bits=4):
    """Algorithm 1 of arXiv:2301.00774, columns from left to right: (values [N, K], codes or None)."""
    low, high = formats.code_range(bits)
    weights, (rows, columns) = weights.clone(), weights.shape
    inverse = torch.linalg.inv(hessian + DAMPING * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype))
    kept = torch.ones(rows, columns, dtype=torch.bool) if keep is None else keep.clone()
    values, codes = torch.zeros_like(weights), torch.zeros(rows, columns, dtype=torch.int8)
    size = BLOCK if pattern is None else pattern[1]
    for column in range(columns):
        if column % size == 0:
            choose(weights, inverse, column, min(column + size, columns), kept, sparsity, pattern)
        values[:, column] = weights[:, column] * kept[:, column]
        if scales is not None:
            scale = scales[:, column // (columns // scales.shape[1])]
            code = (values[:, column] / scale).round().clamp(low, high)
            codes[:, column], values[:, column] = code.to(torch.int8), code * scale
        error = (weights[:, column] - values[:, column]) / inverse[column, column]
        weights -= error.outer(inverse[column])
        inverse = eliminated(inverse, column)
        inverse[column, column] = 1.0  # gone; only keeps later divisions from 0 / 0
    return values, codes


def matrix_of(weights: torch.Tensor, hessian: torch.Tensor, keep: torch.Tensor | None = None) -> Matrix:
    return Matrix("layers.0.w", weights, torch.float32, {"hessian": hessian}, keep=keep)


@pytest.mark.parametrize(("rows", "columns", "seed"), [(5, 16, 0), (7, 136, 1), (3, 200, 2)])
@pytest.mark.parametrize(("sparsity", "pattern"), [(0.5, "none"), (0.8, "none"), (0.5, "2:4"), (0.5, "4:8")])
def test_weights_and_masks_equal_the_textbook_update(
    rows: int, columns: int, seed: int, sparsity: float, pattern: str
) -> None:
    weights, hessian = problem(rows, columns, seed)
    given = matrix_of(weights, hessian)
    options = {"sparsity": sparsity, "pattern": pattern}
    PRUNERS.read({"kind": "sparsegpt", **options}).apply(given)
    values, _ = textbook(weights, hessian, sparsity, PATTERNS[pattern])
    assert torch.equal(given.keep, values != 0)
    assert (given.weight - values).abs().max() <= 1e-6
    if pattern == "none":
        assert ((values == 0).sum(1) == round(sparsity * columns)).all()
    else:
        stay, group = PATTERNS[pattern]
        assert ((given.weight.view(-1, group) != 0).sum(1) == stay).all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_columns_in_order_of_their_inputs_are_the_textbook_update_of_a_permuted_problem(pattern: str) -> None:
    weights, hessian = problem(4, 80, seed=5)
    given = matrix_of(weights, hessian)
    PRUNERS.read({"kind": "sparsegpt", "pattern": pattern, "act_order": True}).apply(given)
    size = 1 if PATTERNS[pattern] is None else PATTERNS[pattern][1]
    energy = hessian.diagonal().view(-1, size).sum(1).tolist()
    groups = sorted(range(len(energy)), key=lambda group: -energy[group])
    order = [group * size + place for group in groups for place in range(size)]
    values, _ = textbook(weights[:, order], hessian[order][:, order], 0.5, PATTERNS[pattern])
    assert (given.weight[:, order] - values).abs().max() <= 1e-6
    if pattern != "none":
        assert ((given.weight.view(-1, size) != 0).sum(1) == PATTERNS[pattern][0]).all()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pruned", [False, True])
def test_rounding_in_the_same_sweep_equals_the_textbook_update(pattern: str, pruned: bool) -> None:
    weights, hessian = problem(6, 136, seed=3)
    keep = torch.rand(6, 136, generator=torch.Generator().manual_seed(0)) > 0.1 if pruned else None
    given = matrix_of(weights, hessian, keep)
    step = {
        "kind": "gptq",
        "bits": 4,
        "group_size": 68,
        "scale": "absmax",
        "act_order": False,
        "scale_dtype": "float32",
    }
    QUANTIZERS.read({**step, "sparsity": 0.5, "pattern": pattern}).apply(given)
    sparse, _ = textbook(weights, hessian, 0.5, PATTERNS[pattern], keep)
    scales = (sparse.view(6, 2, 68).abs().amax(-1) * (2 / 15)).float()
    assert (given.stored.scales - scales).abs().max() <= 1e-6
    _, codes = textbook(weights, hessian, 0.5, PATTERNS[pattern], keep, given.stored.scales.double())
    assert torch.equal(given.stored.codes, codes)
    if pattern != "none" and not pruned:
        assert ((codes.view(-1, PATTERNS[pattern][1]) != 0).sum(1) <= PATTERNS[pattern][0]).all()


def test_a_quantizer_that_follows_rounds_what_sparsegpt_left() -> None:
    weights, hessian = problem(8, 96, seed=4)
    given = matrix_of(weights, hessian)
    PRUNERS.read({"kind": "sparsegpt", "pattern": "2:4"}).apply(given)
    sparse = given.weight
    QUANTIZERS.read({"kind": "gptq", "bits": 8, "group_size": 32}).apply(given)
    assert not given.weight[sparse == 0].any()
    assert (given.weight - sparse).norm() < 0.02 * sparse.norm()


def test_a_mask_of_an_earlier_pruner_stays_and_is_made_up_for() -> None:
    weights, hessian = problem(8, 96, seed=6)
    given = Matrix("w", weights, torch.float32, {"hessian": hessian, "meansquare": hessian.diagonal()})
    PRUNERS.read({"kind": "wanda", "sparsity": 0.5}).apply(given)
    mask, before = given.keep, given.errors().output
    PRUNERS.read({"kind": "sparsegpt", "sparsity": 0.25}).apply(given)  # less than a block has lost already
    values, _ = textbook(weights, hessian, 0.25, None, mask)
    assert (given.weight - values).abs().max() <= 1e-6
    assert not given.weight[~mask].any() and given.errors().output < 0.9 * before


@pytest.mark.parametrize("options", [{}, {"pattern": "2:4"}])
def test_output_error_is_below_that_of_the_same_fraction_without_an_update(options: dict) -> None:
    weights, hessian = problem(32, 128, seed=7)
    errors = {}
    for kind in ("magnitude", "wanda", "sparsegpt"):
        given = Matrix("w", weights, torch.float32, {"hessian": hessian, "meansquare": hessian.diagonal()})
        PRUNERS.read({"kind": kind, **options}).apply(given)
        errors[kind] = given.errors().output
    assert errors["sparsegpt"] < 0.85 * errors["wanda"] and errors["wanda"] < errors["magnitude"], errors


def test_without_a_factor_nothing_is_updated_and_that_is_said() -> None:
    weights, _ = problem(4, 32, seed=0)
    hessian = torch.full((32, 32), 5.0, dtype=torch.float64).fill_diagonal_(1.0)
    given = matrix_of(weights, hessian)
    PRUNERS.read({"kind": "sparsegpt"}).apply(given)
    assert given.notes == ["no Cholesky factor at any damping: pruned without an update of the other weights"]
    assert torch.equal(given.weight[given.keep], weights[given.keep]) and int(given.keep.sum()) == 64
    both = matrix_of(weights, hessian)
    QUANTIZERS.read({"kind": "gptq", "group_size": 32, "sparsity": 0.5}).apply(both)
    assert not both.stored.codes[~given.keep].any() and "rounded to nearest" in both.notes[0]


def test_inputs_that_are_always_zero_go_first() -> None:
    weights, hessian = problem(4, 32, seed=0)
    dead = list(range(0, 32, 2))
    hessian[dead] = 0
    hessian[:, dead] = 0
    given = matrix_of(weights, hessian)
    PRUNERS.read({"kind": "sparsegpt"}).apply(given)
    assert given.keep[:, dead].sum() < 0.2 * given.keep[:, 1::2].sum(), given.keep.sum(0)


def test_a_pattern_needs_half_of_the_weights_and_columns_that_it_divides() -> None:
    with pytest.raises(SpecError, match=r"pattern 2:4 zeroes half of the weights, sparsity is 0\.0"):
        QUANTIZERS.read({"kind": "gptq", "pattern": "2:4"})
    step = QUANTIZERS.read({"kind": "gptq", "group_size": 0, "sparsity": 0.5, "pattern": "4:8"})
    with pytest.raises(SpecError, match=r"gptq: pattern 4:8 does not divide the 12 input features of layers\.0"):
        step.check("layers.0", 4, 12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pattern": "2:4"}], ids=["half", "2:4"])
def test_sparsegpt_beats_wanda_on_a_real_model(options: dict, stories: tuple, compress) -> None:
    model, calibration, rows = stories
    found = {}
    for kind in ("wanda", "sparsegpt"):
        step = {"kind": kind, **options}
        made = compress(model, step, name=kind, num_sequences=40, seq_len=128, calibration_text=str(calibration))
        found[kind] = perplexity(made.folder, rows)
    assert found["sparsegpt"] < 0.95 * found["wanda"], found


def test_the_files_hold_the_pattern(tiny_llama: Path, compress) -> None:
    made = compress(tiny_llama, {"kind": "sparsegpt", "pattern": "2:4"}, name="sparse")
    assert made.figures["sparsity"].value == made.figures["sparsity"].estimate.value == 0.5
    for layer in load(made.folder).layers:
        assert ((layer.mixer.qkv.weight.view(-1, 4) != 0).sum(1) == 2).all()
    step = {"kind": "gptq", "group_size": 32, "sparsity": 0.5, "pattern": "2:4"}
    both = compress(tiny_llama, step, name="both")
    for layer in load(both.folder).layers:
        weight = layer.mixer.qkv.dequantize(torch.float32)
        assert ((weight.view(-1, 4) != 0).sum(1) <= 2).all() and (weight == 0).float().mean() < 0.6
