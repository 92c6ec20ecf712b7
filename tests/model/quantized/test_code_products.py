"""Products of 8-bit codes on both sides compute what the simulated ones do: the GPU's path, run here by its reference."""

from __future__ import annotations

import pytest
import torch

from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.layouts import write
from hone.model.quantized.rounded_inputs import RoundedInputs
from hone.model.quantized.scheme import Scheme
from hone.ops.rounding.inputs import ACTIVATIONS, static_tensors

CASES = {
    "fp8_token": Scheme(8, layout="float-quantized", number="e4m3", activations=ACTIVATIONS["fp8_token"]),
    "fp8_tensor": Scheme(
        8, layout="float-quantized", number="e4m3", per_tensor=True, activations=ACTIVATIONS["fp8_tensor"]
    ),
    "fp8_group": Scheme(
        8, layout="float-quantized", number="e4m3", block=(128, 128), activations=ACTIVATIONS["fp8_group"]
    ),
    "int8_token": Scheme(8, layout="int-quantized", activations=ACTIVATIONS["int8_token"]),
    "int8_tensor": Scheme(8, layout="int-quantized", activations=ACTIVATIONS["int8_tensor"]),
}


def made(scheme: Scheme, kind: type[Dequantizing], monkeypatch: pytest.MonkeyPatch) -> Dequantizing:
    """A linear of two modules, 256 -> 128 + 144 rows, with a bias, that takes its inputs for a GPU's."""
    linear = kind(256, 272, True, scheme=scheme)
    parts = []
    for rows in (128, 144):
        weight = torch.randn(rows, 256) * 0.05
        high, wide = scheme.extent(rows, 256)
        grid = scheme.grid(rows, 256)
        scales = torch.full(grid, float(weight.abs().max()) / (127 if scheme.number == "int" else 448))
        assert high * grid[0] >= rows and wide * grid[1] >= 256
        part = write(scheme.quantize(weight, scales))
        if scheme.activations is not None:
            part |= static_tensors(scheme.activations, -2.0, 2.0)
        parts.append(part | {"bias": torch.randn(rows)})
    linear.load(parts)
    monkeypatch.setattr(linear, "_runs_codes", lambda x, integer=False: True)
    return linear


@pytest.mark.parametrize("name", CASES)
def test_codes_give_the_simulated_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = made(CASES[name], RoundedInputs, monkeypatch)
    x = torch.randn(3, 5, 256)
    assert linear._codes_kind(x) == name[: name.index("_")]  # type: ignore[attr-defined]
    found = linear(x)
    monkeypatch.setattr(linear, "_codes_kind", lambda x: None)
    torch.testing.assert_close(found, linear(x), rtol=1e-4, atol=1e-4)


def test_fine_grained_fp8_rounds_its_inputs_where_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = made(Scheme(8, layout="fp8", number="e4m3", block=(128, 128)), Dequantizing, monkeypatch)
    x = torch.randn(5, 256)
    found, exact = linear(x), linear._product(x, linear.bias)
    error = (found - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.05


@pytest.mark.parametrize("name", ["int8_token_asymmetric", "int4_token", "fp8_token"])
def test_other_numbers_stay_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = made(Scheme(8, layout="int-quantized", activations=ACTIVATIONS[name]), RoundedInputs, monkeypatch)
    assert linear._codes_kind(torch.randn(5, 256)) is None  # type: ignore[attr-defined]
