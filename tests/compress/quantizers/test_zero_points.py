"""Asymmetric grids: where zero lies, against compressed-tensors and a plain loop, and in a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.model.hf import load
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.scheme import Scheme
from hone.ops import formats
from hone.ops.rounding.integer_grid import find_grid
from tests.compress.quantizers.test_gptq import problem


def weights_of(rows: int = 16, columns: int = 64) -> torch.Tensor:
    """Weights whose groups lie around zero, above it and below it."""
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weights[1::3] += 2.5
    weights[2::3] -= 6.0
    return weights


def rounded(weights: torch.Tensor, bits: int, how: str, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    found = find_grid(weights, bits, 32, how, dtype, symmetric=False, **options)
    return Scheme(bits, 32, symmetric=False).quantize(weights, *found).weight(weights.dtype)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_absmax_is_the_grid_of_compressed_tensors(bits: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = weights_of()
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=32)
    groups = weights.view(16, 2, 32)
    scales, points = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    ours = find_grid(weights, bits, 32, "absmax", torch.float32, symmetric=False)
    assert torch.allclose(ours.scales, scales, rtol=1e-6)
    assert torch.equal(ours.zero_points.int(), points.int())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("how", ["absmax", "search"])
def test_every_grid_has_a_zero(bits: int, how: str) -> None:
    weights = weights_of()
    weights[:, ::5] = 0
    weights[3] = 0
    back = rounded(weights, bits, how, torch.float16)
    assert (back[weights == 0] == 0).all() and torch.isfinite(back).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_is_at_least_as_good_and_heeds_importance(bits: int) -> None:
    weights = weights_of()
    importance = torch.rand(64, generator=torch.Generator().manual_seed(2)) ** 8

    def lost(how: str, of: torch.Tensor | float = 1.0, **options) -> torch.Tensor:
        change = (rounded(weights, bits, how, **options) - weights).square() * of
        return change.view(16, 2, 32).sum(-1)

    assert (lost("search") <= lost("absmax")).all() and lost("search").sum() < 0.95 * lost("absmax").sum()
    assert lost("search", importance, importance=importance).sum() < lost("search", importance).sum()


def test_groups_away_from_zero_need_a_zero_point() -> None:
    weights = weights_of()
    errors = {}
    for symmetric in (True, False):
        matrix = Matrix("w", weights, torch.float32)
        QUANTIZERS.read({"kind": "rtn", "group_size": 32, "symmetric": symmetric, "scale": "search"}).apply(matrix)
        errors[symmetric] = (matrix.weight - weights).view(16, -1).norm(dim=1)
    # A grid holds zero, too: of weights between 4 and 8 half of it is unused, where a symmetric one leaves more unused.
    assert (errors[False][1::3] < 0.75 * errors[True][1::3]).all()


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_rounds_on_the_raised_grid_as_a_plain_loop_does(bits: int) -> None:
    weights, hessian = problem(6, 64, seed=bits)
    weights[::2] += 1.0
    matrix = Matrix("w", weights, torch.float32, {"hessian": hessian})
    step = {"kind": "gptq", "bits": bits, "group_size": 32, "symmetric": False, "act_order": False}
    QUANTIZERS.read(step).apply(matrix)
    scales, points = matrix.stored.scales.double(), matrix.stored.zero_points.double()
    low, high = formats.code_range(bits)
    left = weights.clone()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64))
    upper = torch.linalg.cholesky(inverse, upper=True)
    for column in range(64):
        scale, point = scales[:, column // 32], points[:, column // 32]
        code = (left[:, column] / scale + point).round().clamp(low, high)
        assert torch.equal(code, matrix.stored.codes[:, column].double())
        error = (left[:, column] - (code - point) * scale) / upper[column, column]
        left[:, column:] -= error.outer(upper[column, column:])
    nearest = Matrix("w", weights, torch.float32, {"hessian": hessian})
    QUANTIZERS.read({"kind": "rtn", **{name: value for name, value in step.items() if name in ("bits", "group_size",
                     "symmetric")}, "scale": "search"}).apply(nearest)  # fmt: skip
    assert matrix.errors().output < 0.9 * nearest.errors().output


def test_what_zero_points_cannot_do_is_refused() -> None:
    with pytest.raises(SpecError, match="scale signed is for symmetric grids"):
        QUANTIZERS.read({"kind": "rtn", "symmetric": False, "scale": "signed"})
    weights, hessian = problem(4, 32, seed=0)
    matrix = Matrix("layers.0.x", weights, torch.float32, {"hessian": hessian})
    matrix.prune(weights > 0)
    with pytest.raises(SpecError, match=r"gptq: pruned weights and zero points at layers\.0\.x"):
        QUANTIZERS.read({"kind": "gptq", "group_size": 32, "symmetric": False}).apply(matrix)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_folder_with_zero_points_is_said_and_loads(bits: int, tiny_llama: Path, compress) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers
    from transformers.utils.quantization_config import CompressedTensorsConfig

    # compressed-tensors multiplies codes in the dtype of the scales.
    options = {"symmetric": False, "scale": "search", "scale_dtype": "float32"}
    made = compress(tiny_llama, {"kind": "rtn", "bits": bits, "group_size": 32, **options})
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert "CompressedTensorsConfig(dequantize=True)" in made.techniques[0]["note"]
    model, tokens = load(made.folder), torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    layers = [module for module in model.modules() if isinstance(module, Dequantizing)]
    assert len(layers) == 8 and all(module.zero_points is not None for module in layers)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        made.folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        assert (model(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def test_symmetric_grids_have_no_note(tiny_llama: Path, compress) -> None:
    assert "note" not in compress(tiny_llama, {"kind": "rtn", "group_size": 32}).techniques[0]
