"""DoRA's linear: gradients against autograd of the formula in float64, and what is kept for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops import dora_linear
from hone.ops.activation.reference import swiglu
from tests.ops.lora.test_lora import BIAS, PIECES, WEIGHT, leaves

SCALES = {"whole": (1.7,), "stacked": (1.7, 0.5, 2.0), "some": (0.9,)}


def given(name: str, gated: bool) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    x, downs, ups = leaves(name, gated)
    generator = torch.Generator().manual_seed(4)
    lengths = [torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5 for _, rows, _ in PIECES[name]]
    return x, downs, ups, [one.requires_grad_() for one in lengths]


def ours(name: str, gated: bool, x: Tensor, downs: list[Tensor], ups: list[Tensor], lengths: list[Tensor]) -> Tensor:
    options = {"scales": SCALES[name], "begins": [begin for begin, *_ in PIECES[name]], "gated": gated}
    return dora_linear(x, WEIGHT.to, BIAS, WEIGHT.square().sum(1), downs, ups, lengths, **options)


def formula(name: str, gated: bool, x: Tensor, downs: list[Tensor], ups: list[Tensor], lengths: list[Tensor]) -> Tensor:
    """Rows of W + s B A, each divided by its detached length and multiplied by m."""
    rows = list(WEIGHT.unbind(0))
    for (begin, count, _), down, up, length, scale in zip(PIECES[name], downs, ups, lengths, SCALES[name], strict=True):
        whole = WEIGHT[begin : begin + count] + scale * up @ down
        rows[begin : begin + count] = (length[:, None] * whole / whole.detach().norm(dim=1, keepdim=True)).unbind(0)
    return F.linear(swiglu(x) if gated else x, torch.stack(rows), BIAS)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_gradients_are_those_of_autograd(name: str, gated: bool) -> None:
    x, downs, ups, lengths = given(name, gated)
    found, plain = ours(name, gated, x, downs, ups, lengths), formula(name, gated, x, downs, ups, lengths)
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=1e-12)
    flow = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    asked = [x, *downs, *ups, *lengths]
    for mine, theirs in zip(
        torch.autograd.grad(found, asked, flow), torch.autograd.grad(plain, asked, flow), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def test_a_length_of_zero_gives_zeros_and_no_gradient() -> None:
    x, downs, ups, lengths = given("whole", False)
    with torch.no_grad():
        lengths[0][3] = 0.0
    found = ours("whole", False, x, downs, ups, lengths)
    torch.testing.assert_close(found[..., 3], BIAS[3].expand(2, 5))
    (grad,) = torch.autograd.grad(found.sum(), lengths[0])
    assert grad[3] == 0 and bool(grad.isfinite().all())


def test_a_large_bias_costs_the_gradient_of_lengths_no_digits() -> None:
    x, downs, ups, lengths = given("whole", False)
    found = []
    for bias in (BIAS, BIAS + 300):
        narrow = [one.detach().bfloat16() for one in (x, *downs, *ups)]
        length = lengths[0].detach().float().requires_grad_()
        y = dora_linear(
            narrow[0], WEIGHT.to, bias.bfloat16(), WEIGHT.square().sum(1).float(), narrow[1:2], narrow[2:], [length],
            scales=SCALES["whole"],
        )  # fmt: skip
        found += torch.autograd.grad(y.float().sum(), length)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_graph_gets_the_formula() -> None:
    x, downs, ups, lengths = given("stacked", True)

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return ours("stacked", True, x, list(rest[:3]), list(rest[3:6]), list(rest[6:]))

    every = (x, *downs, *ups, *lengths)
    torch.testing.assert_close(torch.compile(run, backend="eager")(*every), run(*every))
