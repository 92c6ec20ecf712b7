"""The gate's kernels in the interpreter against plain torch, and three pointwise kernels in one graph."""

from __future__ import annotations

import torch

from hone.ops import clamped_swiglu, rms_norm, rope, swiglu
from tests.ops.agree import agree, graded


def test_swiglu() -> None:
    gate_up = torch.randn(3, 5, 34, requires_grad=True)
    agree(lambda backend: graded(swiglu(gate_up, backend=backend), gate_up), "torch")


def test_clamped_swiglu() -> None:
    gate_up = (4 * torch.randn(3, 5, 34)).requires_grad_()
    agree(lambda backend: graded(clamped_swiglu(gate_up, 2.0, 1.3, backend=backend), gate_up))
    compiled = torch.compile(lambda x: clamped_swiglu(x, 2.0, backend="triton"), fullgraph=True, backend="aot_eager")
    for one, other in zip(*(graded(way(gate_up), gate_up) for way in (compiled, lambda x: clamped_swiglu(x, 2.0)))):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_graphs_hold_torch_ops() -> None:
    """Under torch.compile the kernels are ops with gradients; called eagerly they are Functions: both give the same."""
    x, residual = torch.randn(2, 3, 4, 16).unbind()
    weight, angles = torch.rand(16, requires_grad=True), torch.randn(3, 1, 4)
    x.requires_grad_()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, summed = rms_norm(x, weight, 1e-5, residual, backend="triton")
        gated = swiglu(y + summed, backend="triton")
        return rope(gated, angles.cos(), angles.sin(), backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(*(graded(way(x, weight), x, weight) for way in (compiled, run)), strict=True):
        assert torch.equal(ours, plain)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight), run(x, weight))
