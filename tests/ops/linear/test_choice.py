"""Which backend the matrix products take, and why."""

from __future__ import annotations

import pytest
import torch

from hone.ops.dispatch import Where, choose

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
