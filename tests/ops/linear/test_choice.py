"""Which backend the matrix products take, and why."""

from __future__ import annotations

import pytest
import torch

from hone.ops.dispatch import Where, choose
from hone.ops.linear.shapes import gated_fill, gated_pays

HOPPER = Where("cuda", (9, 0), 132, (3, 6))
AMPERE = Where("cuda", (8, 0), 108, (3, 6))
CPU = Where()
LINEAR = {
    "dtype": torch.bfloat16,
    "rows": 16,
    "out_features": 4096,
    "in_features": 4096,
    "in_rows": True,
    "plain": True,
}
CODES = {
    "dtype": torch.bfloat16,
    "rows": 16,
    "bits": 4,
    "group_size": 128,
    "in_features": 4096,
    "tiled": True,
    "plain": True,
}
FP8 = {"dtype": torch.bfloat16, "rows": 16, "out_features": 4096, "in_features": 4096, "blockwise": False}


@pytest.mark.parametrize(
    ("where", "change", "backend", "says"),
    [
        (HOPPER, {}, "triton", "read once"),
        (AMPERE, {"rows": 1}, "triton", "read once"),
        (HOPPER, {"rows": 65}, "cublas", "65 rows"),
        (HOPPER, {"plain": False}, "cublas", "gradients"),
        (HOPPER, {"dtype": torch.float32}, "cublas", "float32"),
        (HOPPER, {"dtype": None}, "cublas", "None"),
        (HOPPER, {"in_features": 4100}, "cublas", "16-byte"),
        (HOPPER, {"in_features": 0}, "cublas", "16-byte"),
        (HOPPER, {"in_rows": False}, "cublas", "transposed"),
        (CPU, {}, "reference", "no GPU"),
        (Where("cuda", (9, 0), 132, (0, 0)), {}, "reference", "not installed"),
    ],
)
def test_linear(where: Where, change: dict, backend: str, says: str) -> None:
    choice = choose("linear", where, **{**LINEAR, **change})
    assert choice.backend == backend and says in choice.reason


GATED = {"dtype": torch.bfloat16, "rows": 8192, "features": 14336, "in_features": 4096, "in_rows": True, "plain": True}


@pytest.mark.parametrize(
    ("where", "change", "backend", "says"),
    [
        (HOPPER, {}, "gluon", "before it is written"),
        (HOPPER, {"rows": 1}, "separate", "1 rows fill"),
        (HOPPER, {"rows": 512, "features": 256}, "separate", "smaller"),
        (HOPPER, {"plain": False}, "separate", "gradients"),
        (HOPPER, {"dtype": torch.float32}, "separate", "16 bits"),
        (HOPPER, {"dtype": None}, "separate", "16 bits"),
        (HOPPER, {"in_features": 4100}, "separate", "16-byte"),
        (HOPPER, {"features": 14330}, "separate", "16-byte"),
        (HOPPER, {"in_rows": False}, "separate", "16-byte"),
        (AMPERE, {}, "separate", "Hopper"),
        (CPU, {}, "separate", "no GPU"),
    ],
)
def test_gated_linear(where: Where, change: dict, backend: str, says: str) -> None:
    choice = choose("gated_linear", where, **{**GATED, **change})
    assert choice.backend == backend and says in choice.reason


def test_tiles_that_are_wanted() -> None:
    assert gated_fill(128, 128 * 132, 132) == 1.0
    assert gated_fill(64, 128 * 132, 132) == 0.5
    assert gated_fill(128, 128 * 133, 132) == pytest.approx(133 / 264)
    assert gated_fill(0, 128, 132) == 0.0


@pytest.mark.parametrize(
    ("rows", "features", "columns", "pays"),
    [
        (8192, 14336, 4096, True),
        (1024, 14336, 4096, True),
        (1536, 14336, 4096, False),
        (512, 14336, 4096, False),
        (8192, 3072, 1024, True),
        (640, 3072, 1024, True),
        (768, 3072, 1024, False),
    ],
)
def test_one_kernel_for_product_and_gate_where_it_was_faster(
    rows: int, features: int, columns: int, pays: bool
) -> None:
    """Measured on an H200 (docs/ops.md)."""
    assert gated_pays(rows, features, columns, 132) == pays


@pytest.mark.parametrize(
    ("where", "change", "backend", "says"),
    [
        (HOPPER, {}, "gluon", "4-bit"),
        (HOPPER, {"rows": 4096}, "gluon", "registers"),
        (HOPPER, {"group_size": 4096, "bits": 8}, "gluon", "8-bit"),
        (HOPPER, {"group_size": 96}, "reference", "groups of 96"),
        (HOPPER, {"group_size": 16}, "reference", "groups of 16"),
        (HOPPER, {"tiled": False}, "reference", "not tiled"),
        (HOPPER, {"plain": False}, "reference", "gradient"),
        (HOPPER, {"dtype": torch.float32}, "reference", "float32"),
        (AMPERE, {}, "reference", "Hopper"),
        (CPU, {}, "reference", "no GPU"),
    ],
)
def test_quantized_linear(where: Where, change: dict, backend: str, says: str) -> None:
    choice = choose("quantized_linear", where, **{**CODES, **change})
    assert choice.backend == backend and says in choice.reason


@pytest.mark.parametrize(
    ("where", "change", "backend", "says"),
    [
        (HOPPER, {}, "triton", "16 rows"),
        (HOPPER, {"rows": 257}, "torch", "257 rows"),
        (HOPPER, {"rows": 257, "blockwise": True}, "triton", "blocks"),
        (HOPPER, {"rows": 257, "out_features": 100}, "triton", "257 rows"),
        (HOPPER, {"in_features": 100}, "reference", "16-byte"),
        (AMPERE, {}, "reference", "no fp8"),
        (CPU, {}, "reference", "no GPU"),
    ],
)
def test_fp8_linear(where: Where, change: dict, backend: str, says: str) -> None:
    choice = choose("fp8_linear", where, **{**FP8, **change})
    assert choice.backend == backend and says in choice.reason


SPARSE = {"dtype": torch.bfloat16, "rows": 16, "in_features": 4096, "masked": True, "plain": True}


@pytest.mark.parametrize(
    ("where", "change", "backend", "says"),
    [
        (HOPPER, {}, "gluon", "16 rows"),
        (HOPPER, {"rows": 65}, "torch", "65 rows"),
        (HOPPER, {"in_features": 4160}, "torch", "256s of columns"),
        (HOPPER, {"masked": False}, "torch", "few rows"),
        (HOPPER, {"plain": False}, "torch", "no gradient"),
        (AMPERE, {}, "torch", "Hopper"),
        (CPU, {}, "reference", "no GPU"),
    ],
)
def test_sparse_linear(where: Where, change: dict, backend: str, says: str) -> None:
    choice = choose("sparse_linear", where, **{**SPARSE, **change})
    assert choice.backend == backend and says in choice.reason
