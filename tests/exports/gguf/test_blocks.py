"""Blocks agree with gguf-py byte for byte, and their errors are not above those of ggml's own quantization."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.exports.gguf.blocks import decode, encode, fit, from_bytes, repack, to_bytes
from hone.exports.gguf.formats import FORMATS, fitting
from tests.exports.gguf import llama_cpp

BLOCKED = [name for name, form in FORMATS.items() if form.parts]


def weights(kind: str, rows: int = 32, columns: int = 512) -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "normal":
        return 0.02 * torch.randn(rows, columns)
    if kind == "tails":
        return 0.02 * torch.distributions.StudentT(4.0).sample((rows, columns))
    return 0.02 * torch.rand(rows, columns) + 0.01  # all above zero


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_gguf_py_reads_the_same_weights_from_any_bytes(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    form = FORMATS[name]
    stored = torch.randint(0, 256, (16, form.num_bytes(1, 512)), dtype=torch.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType(form.number))
    assert np.array_equal(decode(stored, form).numpy(), theirs, equal_nan=True)
    assert gguf.GGML_QUANT_SIZES[form.number] == (form.block, form.block_bytes)


@pytest.mark.parametrize("name", BLOCKED)
def test_every_bit_of_a_block_has_its_place(name: str) -> None:
    form = FORMATS[name]
    stored = torch.randint(0, 256, (64, form.block_bytes), dtype=torch.uint8)
    assert torch.equal(to_bytes(from_bytes(stored, form), form), stored)


@pytest.mark.parametrize("kind", ["normal", "tails", "positive"])
@pytest.mark.parametrize("name", BLOCKED)
def test_errors_are_not_above_those_of_ggml(name: str, kind: str) -> None:
    form, given = FORMATS[name], weights(kind)
    ours = relative_error(decode(encode(given, form), form), given)
    theirs = llama_cpp.quantize(given.numpy(), form.number, form.num_bytes(1, given.shape[1]))
    assert ours <= 1.0001 * relative_error(decode(torch.from_numpy(theirs), form), given)


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_errors_are_not_above_those_of_gguf_py(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    form, given = FORMATS[name], weights("tails")
    theirs = gguf.quantize(given.numpy(), gguf.GGMLQuantizationType(form.number))
    ours = relative_error(decode(encode(given, form), form), given)
    assert ours <= 1.0001 * relative_error(decode(torch.from_numpy(theirs), form), given)


@pytest.mark.parametrize("name", [name for name in BLOCKED if name != "q8_0"])
def test_importance_moves_the_error_to_unimportant_columns(name: str) -> None:
    form, given = FORMATS[name], weights("normal")
    importance = torch.logspace(-3, 1, 512)[torch.randperm(512, generator=torch.Generator().manual_seed(0))]

    def weighted(found: torch.Tensor) -> float:
        return float(((found - given).square() * importance).sum())

    plain, chosen = decode(encode(given, form), form), decode(encode(given, form, importance), form)
    assert weighted(chosen) < 0.95 * weighted(plain)


@pytest.mark.parametrize(("name", "bits"), [("q4_0", 4), ("q4_0", 3), ("q5_0", 5), ("q8_0", 8), ("q8_0", 4)])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_repacked_codes_are_the_same_weights(name: str, bits: int, groups: int) -> None:
    form, half = FORMATS[name], 1 << (bits - 1)
    codes = torch.randint(-half, half, (8, 256), dtype=torch.int8)
    scales = (0.01 * torch.randn(8, groups)).to(torch.float16)
    product = codes.float().view(8, groups, -1) * scales.float().unsqueeze(-1)
    assert torch.equal(decode(repack(codes, scales, form), form), product.view(8, 256))


@pytest.mark.parametrize("name", BLOCKED)
def test_groups_without_a_range_stay_finite(name: str) -> None:
    form = FORMATS[name]
    given = torch.zeros(6, 256)
    given[1] = 0.5
    given[2] = -0.5
    given[3, 7] = 1.0
    given[4] = 1e-30
    given[5, 3] = 3e38
    found = decode(encode(given, form), form)
    assert torch.isfinite(found).all()
    assert not found[0].any() and not found[4].any()
    assert (found[1:4] - given[1:4]).abs().max() <= 0.02


def test_floats_are_rounded_to_nearest() -> None:
    given = weights("normal")
    for name, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        assert torch.equal(decode(encode(given, FORMATS[name]), FORMATS[name]), given.to(dtype).float())


def test_rows_that_are_no_whole_number_of_blocks_get_a_smaller_block() -> None:
    assert [fitting("q4_k", columns).name for columns in (512, 96, 100)] == ["q4_k", "q5_0", "f16"]
    assert fitting("q6_k", 64).name == "q8_0"
    with pytest.raises(AssertionError, match="no whole number"):
        FORMATS["q4_k"].num_bytes(1, 96)


def test_fields_of_a_fit_have_their_ranges() -> None:
    found = fit(weights("tails"), FORMATS["q4_k"])
    assert found.scales is not None and found.minima is not None and found.m is not None
    for values, top in ((found.codes, 15), (found.scales, 63), (found.minima, 63)):
        assert int(values.min()) >= 0 and int(values.max()) == top
    assert bool((found.m >= 0).all())
