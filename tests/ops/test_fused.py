"""Norm with residual and codes, rotation into pages: the plain paths against their definitions, and where each op runs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import choose, dispatch, fused, reference, write_kv
from hone.ops.dispatch import Where

F64 = torch.float64
H200 = Where("cuda", (9, 0), 132, (3, 6))


def test_the_residual_is_added_normed_and_returned() -> None:
    x, residual = torch.randn(2, 3, 5, 16, dtype=F64)
    weight = torch.rand(16, dtype=F64)
    y, summed = fused.rms_norm(x, weight, 1e-3, residual)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(y, reference.rms_norm(x + residual, weight, 1e-3))
    leaves = [one.clone().requires_grad_() for one in (x, weight, residual)]
    assert torch.autograd.gradcheck(lambda a, b, c: fused.rms_norm(a, b, 1e-3, c), leaves)


@pytest.mark.parametrize(("kind", "largest", "step"), [("fp8", 448.0, 1 / 16), ("int8", 127.0, 1 / 254)])
def test_codes_times_scales_are_the_norm(kind: str, largest: float, step: float) -> None:
    x, residual = torch.randn(2, 4, 32)
    x[0, 3] = 1000.0
    weight = torch.rand(32) + 0.5
    codes, scales, summed = fused.rms_norm(x, weight, 1e-5, residual, kind)
    y = reference.rms_norm(summed, weight, 1e-5)
    assert scales.shape == (4, 1) and scales.dtype == torch.float32
    torch.testing.assert_close(scales * largest, y.abs().amax(-1, keepdim=True))
    error = (codes.float() * scales - y).abs()
    bound = (y.abs() if kind == "fp8" else y.abs().amax(-1, keepdim=True)) * step
    assert (error <= bound + scales * 2**-9).all()
    assert codes.float().abs().amax(-1).tolist() == [largest] * 4
    zero, scales = fused.rms_norm(torch.zeros(2, 32), weight, 1e-5, quantize=kind)
    assert not zero.float().any() and torch.isfinite(scales).all()


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(2, 8), torch.rand(8)
    with pytest.raises(SpecError, match="residual"):
        fused.rms_norm(x, weight, 1e-5, torch.randn(3, 8))
    with pytest.raises(SpecError, match="weight has 7"):
        fused.rms_norm(x, weight[:7], 1e-5, x)
    for wrong in (weight[:1], torch.rand(2, 8)):  # would be spread over the rows
        with pytest.raises(SpecError, match="x rows have 8"):
            fused.rms_norm(x, wrong, 1e-5)
    with pytest.raises(SpecError, match="odd"):
        fused.swiglu(x[:, :7])
    with pytest.raises(SpecError, match="odd"):
        fused.rope(x[:, None, :7], torch.zeros(2, 1, 3), torch.zeros(2, 1, 3))
    with pytest.raises(SpecError, match="quantize is 'int4'"):
        fused.rms_norm(x, weight, 1e-5, quantize="int4")


def test_rotation_in_place_and_into_pages() -> None:
    qkv = torch.randn(6, 4 + 2 + 2, 16)
    before = qkv.clone()
    q, k, v = qkv.split([4, 2, 2], dim=1)
    angles = torch.randn(6, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.tensor([5, 0, 7, 2, 11, 6])
    k_pages, v_pages, k_expected, v_expected = torch.full((4, 3, 2, 4, 16), 7.0)
    expected = reference.rope(q, cos, sin)
    write_kv(reference.rope(k, cos, sin), v, k_expected, v_expected, slots // 4, slots % 4)
    fused.rope_write(q, k, v, cos, sin, k_pages, v_pages, slots // 4, slots % 4)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k_pages, k_expected)
    assert torch.equal(v_pages, v_expected)
    assert torch.equal(qkv[:, 4:], before[:, 4:])
    again = before[:, :4]
    assert fused.rope(again, cos, sin, in_place=True) is again
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize(
    ("shape", "angles", "rows"),
    [((2, 5, 3, 8), (5,), 5), ((2, 5, 3, 8), (2, 5), 10), ((2, 5, 3, 8), (2, 1), 10), ((5, 3, 8), (1, 5), 5)],
)
def test_angles_repeat_over_the_batch(shape: tuple[int, ...], angles: tuple[int, ...], rows: int) -> None:
    x, cos = torch.randn(shape), torch.randn(*angles, 1, 4)
    found, _ = fused.angle_rows(x, cos, cos)
    assert found.shape == (rows, 4)
    tokens = x[..., 0, 0].numel()
    spread = cos.expand(*shape[:-2], 1, 4) if len(angles) <= len(shape) - 2 else cos.expand(1, *shape[:-2], 1, 4)
    assert torch.equal(found[torch.arange(tokens) % rows], spread.reshape(-1, 4))


def test_pages_of_eight_bits_get_their_scales() -> None:
    q, k, v = torch.randn(5, 4, 16), *torch.randn(2, 5, 2, 16)
    angles = torch.randn(5, 1, 8)
    pages, offsets = torch.tensor([2, 0, 1, 1, 2]), torch.tensor([1, 0, 0, 3, 2])
    (k_pages, v_pages), scales = torch.zeros(2, 3, 2, 4, 16).to(torch.int8), torch.zeros(2, 3, 2, 4)
    fused.rope_write(q, k, v, angles.cos(), angles.sin(), k_pages, v_pages, pages, offsets, *scales)
    found = v_pages[pages, :, offsets].float() * scales[1][pages, :, offsets][..., None]
    torch.testing.assert_close(found, v, atol=float(v.abs().max()) / 254 * 1.01, rtol=0)
    assert not scales[0][0, :, 1:].any() and scales[0][pages, :, offsets].all()


def test_angles_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(SpecError, match="do not turn"):
        fused.angle_rows(torch.randn(5, 3, 8), torch.randn(5, 1, 3), torch.randn(5, 1, 3))


def test_where_they_run() -> None:
    def norm(where: Where, dtype: torch.dtype, weight: torch.dtype, width: int) -> str:
        return choose("rms_norm", where, dtype=dtype, weight_dtype=weight, width=width).backend

    half = torch.bfloat16
    assert norm(H200, half, half, 4096) == "triton"
    assert norm(H200, half, torch.float32, 4096) == norm(H200, half, half, 32768) == norm(H200, F64, F64, 64) == "lean"
    assert norm(Where(), half, half, 4096) == "lean"
    for op in ("swiglu", "rope"):
        assert choose(op, H200, dtype=half).backend == "triton"
        assert choose(op, H200, dtype=F64).backend == choose(op, Where(), dtype=half).backend == "lean"


def test_a_graph_may_choose_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_locate", lambda kind, index: H200)

    def run(x: Tensor) -> Tensor:
        found = dispatch.backend_of("linear_cross_entropy", x.device, dtype=torch.bfloat16)
        plain = dispatch.backend_of("linear_cross_entropy", x.device, dtype=x.dtype)
        return x * (found == "triton") + (plain == "reference")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the tracer warns of what it cannot trace
        warnings.filterwarnings("ignore", "linear_cross_entropy runs its plain torch reference")
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        assert compiled(torch.full((2,), 3.0, dtype=F64)).tolist() == [4.0, 4.0]
