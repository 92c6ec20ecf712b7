"""The casts' kernels in Triton's interpreter against the reference, bit for bit.

On numbers that eight bits hold: the interpreter of Triton 3.6 rounds others wrongly where the fraction carries over (127.2 to
64). `benchmarks/train_fp8.py` compares all numbers on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from hone.ops.fp8 import reference, triton_kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("tensorwise", [False, True])
def test_codes_are_those_of_the_reference(dtype, tensorwise):
    draw = torch.Generator().manual_seed(0)
    for rows, columns in ((144, 208), (16, 128), (128, 16)):
        x = torch.randint(-7, 8, (rows, columns), generator=draw).float()
        x = torch.where(x.abs() < 4, 0.0, x) * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=draw).float())
        x[2], x[:, 3], x[5, 5] = 0.0, 0.0, 1.75 * 2.0**6
        largest = triton_kernels.maxima(x, tensorwise)
        wanted = reference.maxima(x, tensorwise)
        assert all(torch.equal(one, other) for one, other in zip(largest, wanted, strict=True))
        codes, scales, codes_t, scales_t = triton_kernels.cast(x, largest, dtype, tensorwise, rows=True, columns=True)
        for found, by, turned in ((codes, scales, False), (codes_t, scales_t, True)):
            exact, exact_by = reference.codes_of(x, wanted[turned], dtype, columns=turned)
            assert torch.equal(by, exact_by)
            assert torch.equal(found.float(), exact.float())


def test_stacks_of_matrices_have_codes_of_their_own():
    """As the weights of experts; rows of transposed codes begin at multiples of 16 bytes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (3, 40, 144), generator=draw).float() * torch.tensor([1.0, 8.0, 64.0]).view(3, 1, 1)
    largest = triton_kernels.maxima(x, False)
    made = triton_kernels.cast(x, largest, E4M3, False, rows=True, columns=True)
    for turned in (False, True):
        wanted = reference.maxima(x, False)[turned]
        exact, by = reference.codes_of(x, wanted, E4M3, columns=turned)
        assert torch.equal(largest[turned], wanted) and torch.equal(made[2 * turned + 1], by)
        assert torch.equal(made[2 * turned].float(), exact.float())
    assert made[2].stride() == (144 * 48, 48, 1)


def test_only_what_is_asked_for():
    x = torch.randint(-3, 4, (32, 48)).float()
    largest = triton_kernels.maxima(x, False)
    codes, scales, codes_t, scales_t = triton_kernels.cast(x, largest, E4M3, False, rows=False, columns=True)
    assert not codes.numel() and not scales.numel()
    assert torch.equal(codes_t.float(), reference.codes_of(x, largest[1], E4M3, columns=True)[0].float())
    assert torch.isfinite(scales_t).all()
