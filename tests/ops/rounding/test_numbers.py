"""Number formats by table: decoding a code, and the nearest code of a number, against naive definitions."""

from __future__ import annotations

import pytest
import torch

from hone.model.quantized.scheme import Scheme
from hone.ops.rounding import numbers

TABLES = sorted(name for name, found in numbers.NUMBERS.items() if isinstance(found, numbers.Values))


@pytest.mark.parametrize("number", TABLES)
def test_every_code_has_its_table_value(number: str) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    table = numbers.NUMBERS[number].values
    assert numbers.code_dtype(number) == torch.int8
    assert numbers.decode(codes, number, torch.float32).tolist() == torch.tensor(table).tolist()


@pytest.mark.parametrize("number", TABLES)
def test_a_number_gets_the_nearest_value(number: str) -> None:
    steps = torch.linspace(-7, 7, 4001, dtype=torch.float64) / (1 if number == "e2m1" else 6)
    values = numbers.decode(numbers.nearest(steps, number), number, torch.float64)
    table = torch.tensor(numbers.NUMBERS[number].values, dtype=torch.float64)
    least = (steps.unsqueeze(1) - table).abs().amin(1)
    assert ((steps - values).abs() - least).abs().max() <= 1e-7  # midpoints are float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_halves_of_e2m1_go_to_the_even_code(dtype: torch.dtype) -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    for sign in (1, -1):
        found = numbers.decode(numbers.nearest(sign * halves, "e2m1"), "e2m1", torch.float32)
        assert found.tolist() == (sign * wanted).tolist()
    small = numbers.nearest(torch.tensor([0.0, 0.1, -0.1], dtype=dtype), "e2m1")
    assert (small + 8).tolist() == [0, 0, 8], "the sign of zero is kept"


@pytest.mark.parametrize("number", ["nf4", "fp4"])
def test_a_scheme_of_a_table_is_rounded_and_dequantized_in_float32(number: str) -> None:
    weights = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(4, 64, number=number)
    scales = weights.view(3, 2, 64).abs().amax(-1)
    stored = scheme.quantize(weights, scales)
    assert stored.codes.dtype == torch.int8
    table = torch.tensor(numbers.NUMBERS[number].values)
    by_hand = table[(stored.codes + 8).int()] * scales.repeat_interleave(64, 1)
    assert torch.equal(stored.weight(torch.float32), by_hand)
    assert torch.equal(stored.weight(torch.bfloat16), by_hand.bfloat16())
    assert (by_hand - weights).abs().max() < scales.max() / 5
