"""Pruners: which weights go, against the papers' rules written as loops; patterns; what is refused; quality on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import PRUNERS
from hone.compress.matrix import Matrix
from hone.compress.stage import Compress
from hone.model.hf import load
from tests.compress.conftest import perplexity

PATTERNS = {"2:4": (2, 4), "4:8": (4, 8)}


def matrix(rows: int = 6, columns: int = 24) -> tuple[Matrix, torch.Tensor]:
    """A matrix of distinct values, and the mean squares of its inputs."""
    draw = torch.Generator().manual_seed(0)
    squares = torch.rand(columns, generator=draw) + 0.01
    weight = torch.randn(rows, columns, generator=draw)
    return Matrix("layers.0.mixer.qkv", weight, torch.float32, {"meansquare": squares}), squares


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.9])
def test_wanda_compares_the_weights_of_a_row_by_what_they_do_to_its_output(sparsity: float) -> None:
    given, squares = matrix()
    PRUNERS.read({"kind": "wanda", "sparsity": sparsity}).apply(given)
    for weights, kept in zip(given.original.tolist(), given.weight.tolist()):
        scores = [abs(weight) * float(square) ** 0.5 for weight, square in zip(weights, squares)]
        gone = set(sorted(range(24), key=lambda place: scores[place])[: round(sparsity * 24)])
        assert kept == [0.0 if place in gone else weight for place, weight in enumerate(weights)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["magnitude", "wanda"])
def test_a_pattern_leaves_the_largest_of_every_group(kind: str, pattern: str) -> None:
    given, squares = matrix()
    PRUNERS.read({"kind": kind, "pattern": pattern}).apply(given)
    stay, group = PATTERNS[pattern]
    scores = given.original.abs() * (squares.sqrt() if kind == "wanda" else 1.0)
    for row, kept in zip(scores.view(-1, group).tolist(), given.weight.view(-1, group).tolist()):
        largest = sorted(range(group), key=lambda place: row[place])[-stay:]
        assert sorted(place for place in range(group) if kept[place]) == sorted(largest)


def test_equal_scores_go_from_the_left_on_any_machine() -> None:
    given = Matrix("x", torch.ones(2, 8), torch.float32, {"meansquare": torch.ones(8)})
    PRUNERS.read({"kind": "wanda"}).apply(given)
    assert given.weight.tolist() == [[0.0] * 4 + [1.0] * 4] * 2
    given = Matrix("x", torch.ones(1, 8), torch.float32, {"meansquare": torch.ones(8)})
    PRUNERS.read({"kind": "wanda", "pattern": "2:4"}).apply(given)
    assert given.weight.tolist() == [[0.0, 0.0, 1.0, 1.0] * 2]


def test_a_second_pruner_keeps_what_the_first_has_zeroed() -> None:
    given, _ = matrix()
    for step in ({"kind": "magnitude", "sparsity": 0.25}, {"kind": "wanda", "sparsity": 0.5}):
        PRUNERS.read(step).apply(given)
    assert (given.weight == 0).sum(1).tolist() == [12] * 6


def test_random_masks_have_as_many_zeros_and_follow_from_seed_and_name_alone() -> None:
    def kept(name: str = "a", weight: torch.Tensor | None = None, **options) -> torch.Tensor:
        given = Matrix(name, torch.ones(60, 40) if weight is None else weight, torch.float32)
        PRUNERS.read({"kind": "random", **options}).apply(given)
        return given.weight != 0

    mask = kept(sparsity=0.8)
    assert int(mask.sum()) == 480 and torch.equal(mask, kept(weight=torch.rand(60, 40) + 1, sparsity=0.8))
    assert 200 < int((mask.sum(0).double() - 12).abs().sum() + (mask.sum(1).double() - 8).abs().sum()) < 400
    for other in (kept("b", sparsity=0.8), kept(sparsity=0.8, seed=1)):  # 4 % are kept by two independent masks
        assert 50 < int((mask & other).sum()) < 150
    assert (kept(pattern="2:4").view(-1, 4).sum(1) == 2).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.4])
def test_magnitude_compares_the_weights_of_a_row_if_told(sparsity: float) -> None:
    given, _ = matrix()
    PRUNERS.read({"kind": "magnitude", "scope": "row", "sparsity": sparsity}).apply(given)
    for weights, kept in zip(given.original.tolist(), given.weight.tolist()):
        gone = set(sorted(range(24), key=lambda place: abs(weights[place]))[: round(sparsity * 24)])
        assert kept == [0.0 if place in gone else weight for place, weight in enumerate(weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.5, 0.97])
def test_one_threshold_for_the_whole_model_is_that_of_all_weights_sorted(dtype: torch.dtype, sparsity: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(rows, 64, generator=draw).mul_(size).to(dtype) for rows, size in ((40, 1), (16, 3), (24, 0.1))
    ]
    step, calls = PRUNERS.read({"kind": "magnitude", "scope": "global", "sparsity": sparsity}), []

    def read():
        calls.append(1)
        return iter(weights)

    found = step.prepare(read)
    sizes = torch.cat([weight.float().abs().flatten() for weight in weights]).sort().values
    count = round(sparsity * len(sizes))
    assert found["threshold"] == (float(sizes[count - 1]) if count else 0.0) and len(calls) <= 2
    given = [
        Matrix(str(at), weight.to(torch.promote_types(dtype, torch.float32)), dtype)
        for at, weight in enumerate(weights)
    ]
    for one in given:
        one.model = found
        step.apply(one)
        gone, stay = one.original[~one.keep].float().abs(), one.original[one.keep].float().abs()
        assert (gone <= found["threshold"]).all() and (stay >= found["threshold"]).all()
    zeros = sum(int((~one.keep).sum()) for one in given)
    assert abs(zeros - count) <= (len(given) / 2 if dtype in (torch.bfloat16, torch.float16) else 0)


def test_a_model_is_pruned_by_one_threshold(tiny_llama: Path, compress) -> None:
    made = compress(tiny_llama, {"kind": "magnitude", "scope": "global", "sparsity": 0.3})
    gone, stay, fractions = 0.0, float("inf"), set()
    for given, pruned in zip(load(tiny_llama).layers.parameters(), load(made.folder).layers.parameters(), strict=True):
        if given.dim() == 2:
            zero = pruned == 0
            gone, stay = max(gone, float(given[zero].abs().max())), min(stay, float(given[~zero].abs().min()))
            fractions.add(float(zero.float().mean()))
    assert gone <= stay and len(fractions) > 1
    assert made.figures["sparsity"].value == pytest.approx(0.3, abs=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="pattern 2:4 compares neighbours alone, so scope=global would do nothing"):
        PRUNERS.read({"kind": "magnitude", "scope": "global", "pattern": "2:4"})
    with pytest.raises(SpecError, match="magnitude reads the weights of the given model: it must be the first step"):
        Compress.read({"steps": ["wanda", {"kind": "magnitude", "scope": "global"}]})
    with pytest.raises(SpecError, match=r"pattern 2:4 zeroes half of the weights, sparsity is 0\.3"):
        PRUNERS.read({"kind": "wanda", "sparsity": 0.3, "pattern": "2:4"})
    with pytest.raises(SpecError, match=r"pattern 4:8 does not divide the 12 input features of layers\.0"):
        PRUNERS.read({"kind": "wanda", "pattern": "4:8"}).check("layers.0", 4, 12)


def test_wanda_needs_calibration_and_says_how(tiny_llama: Path, compress, calibration_text: Path) -> None:
    with pytest.raises(SpecError, match="wanda needs meansquare") as found:
        compress(tiny_llama, {"kind": "wanda"})
    assert "calibration_text=FILE" in str(found.value.fix)
    made = compress(tiny_llama, {"kind": "wanda", "pattern": "2:4"}, calibration_text=str(calibration_text))
    assert made.figures["sparsity"].value == made.figures["sparsity"].estimate.value == 0.5
    for layer in load(made.folder).layers:
        assert ((layer.mixer.qkv.weight.view(-1, 4) != 0).sum(1) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pattern": "2:4"}], ids=["half", "2:4"])
def test_wanda_beats_magnitude_on_a_real_model(options: dict, stories: tuple, compress) -> None:
    model, calibration, rows = stories
    found = {}
    for kind in ("magnitude", "wanda"):
        step = {"kind": kind, **options}
        made = compress(model, step, name=kind, num_sequences=40, seq_len=128, calibration_text=str(calibration))
        found[kind] = perplexity(made.folder, rows)
    assert found["wanda"] < 0.95 * found["magnitude"], found
