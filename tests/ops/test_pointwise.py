"""Norm, rotation and gate: one public function each, the same under autograd, without gradients and in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hone.base.errors import SpecError
from hone.ops import choose, clamped_swiglu, geglu, linear_cross_entropy, rms_norm, rope, swiglu
from hone.ops.dispatch import Where

F64 = torch.float64
H200 = Where("cuda", (9, 0), 132, (3, 6))
OPS = ("rms_norm", "rope", "swiglu")


def case(op: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """(the op as a function of the tensors that take gradients and of `backend`, these tensors)."""
    x, weight = torch.randn(3, 5, 16).to(dtype).requires_grad_(), torch.rand(16).to(dtype).requires_grad_()
    cos, sin = torch.randn(2, 3, 1, 8).to(dtype)
    if op == "rms_norm":
        return partial(rms_norm, eps=1e-3), (x, weight)
    if op == "rope":
        return lambda x, **options: rope(x, cos, sin, **options), (x,)
    return swiglu, (x,)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_backends_agree_in_values_and_gradients(op: str, dtype: torch.dtype) -> None:
    run, leaves = case(op, dtype)
    close = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    outs = [run(*leaves, **options) for options in ({"backend": "reference"}, {"backend": "torch"}, {})]
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    for out, made in zip(outs[1:], grads[1:]):
        assert out.dtype == dtype
        torch.testing.assert_close(out, outs[0], **close)
        for ours, plain in zip(made, grads[0]):
            torch.testing.assert_close(ours, plain, **close)
    with torch.no_grad():  # bookkeeping is skipped, results are not
        torch.testing.assert_close(run(*leaves), outs[0].detach(), **close)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_differences(op: str) -> None:
    run, leaves = case(op, F64)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradcheck(partial(run, backend="reference"), leaves)


@pytest.mark.parametrize("op", OPS)
def test_in_a_compiled_graph(op: str) -> None:
    run, leaves = case(op, torch.float32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, two in ((compiled(*leaves), run(*leaves)),):
        torch.testing.assert_close(one, two)
        for ours, plain in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (one, two))):
            torch.testing.assert_close(ours, plain)


def test_rms_norm_and_swiglu_are_torchs() -> None:
    x, weight = torch.randn(4, 12, dtype=F64), torch.rand(12, dtype=F64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-4, backend="reference"), F.rms_norm(x, (12,), weight, 1e-4))
    torch.testing.assert_close(swiglu(x, backend="reference"), F.silu(x[:, :6]) * x[:, 6:])


def test_an_offset_is_added_to_the_weight_before_rounding() -> None:
    x, weight = torch.randn(4, 12, dtype=F64), torch.rand(12, dtype=F64)
    expected = F.rms_norm(x, (12,), weight + 1, 1e-4)
    torch.testing.assert_close(rms_norm(x, weight, 1e-4, offset=1.0), expected)
    normed, summed = rms_norm(x, weight, 1e-4, x.flip(0), offset=1.0)
    torch.testing.assert_close(normed, F.rms_norm(summed, (12,), weight + 1, 1e-4))
    small = (2.0**-9 * torch.ones(12)).bfloat16()  # lost if 1 were added in bfloat16
    ours = rms_norm(x.bfloat16(), small, 1e-4, offset=1.0)
    exact = F.rms_norm(x.bfloat16().float(), (12,), small.float() + 1, 1e-4)
    assert torch.equal(ours, exact.bfloat16())
    assert (
        choose("rms_norm", H200, dtype=torch.bfloat16, weight_dtype=torch.bfloat16, width=64, offset=True).backend
        == "torch"
    )
    with pytest.raises(SpecError, match="no offset"):
        rms_norm(x, weight, 1e-4, offset=1.0, backend="triton")


def test_geglu_is_torchs() -> None:
    x = torch.randn(4, 12, dtype=F64)
    torch.testing.assert_close(geglu(x), F.gelu(x[:, :6], approximate="tanh") * x[:, 6:])
    assert choose("geglu", H200).backend == "torch"


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    config = transformers.GptOssConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=6, swiglu_limit=1.5)
    experts = GptOssExperts(config)
    x = (3 * torch.randn(40, 12, dtype=F64)).requires_grad_()
    interleaved = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    wanted, ours = experts._apply_gate(interleaved), clamped_swiglu(x, 1.5)
    torch.testing.assert_close(ours, wanted)
    flow = torch.randn(40, 6, dtype=F64)
    grads = [torch.autograd.grad(out, x, flow, retain_graph=True)[0] for out in (ours, wanted)]
    torch.testing.assert_close(*grads)
    assert 0.2 < float((grads[0] == 0).double().mean()) < 0.8, "some numbers were clamped, some were not"
    assert choose("clamped_swiglu", H200, dtype=torch.bfloat16).backend == "triton"
    assert choose("clamped_swiglu", H200, dtype=F64).backend == "reference"


def test_the_norm_keeps_its_inputs_dtype_whatever_the_weights() -> None:
    x, weight = torch.randn(3, 16).bfloat16(), torch.rand(16)
    ours, plain = (rms_norm(x, weight, 1e-5, backend=backend) for backend in ("torch", "reference"))
    assert ours.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(ours, plain, atol=0.02, rtol=0.01)


def test_what_has_a_gradient_by_hand_has_a_second_one_or_says_so() -> None:
    x, weight = torch.randn(3, 8, dtype=F64, requires_grad=True), torch.rand(8, dtype=F64, requires_grad=True)
    targets = torch.tensor([1, 0, 7])
    for run in (
        lambda: rms_norm(x, weight, 1e-5),
        lambda: swiglu(x),
        lambda: linear_cross_entropy(x, torch.eye(8, dtype=F64), targets),
    ):
        # A loss whose gradient depends on its upstream, as a penalty on gradients has it.
        (grad,) = torch.autograd.grad(run().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    angles = torch.randn(3, 1, 2, dtype=F64)
    assert torch.autograd.gradgradcheck(lambda one: rope(one.view(3, 2, 4), angles.cos(), angles.sin()), x)


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(2, 8), torch.rand(8)
    with pytest.raises(SpecError, match="residual"):
        rms_norm(x, weight, 1e-5, torch.randn(3, 8))
    with pytest.raises(SpecError, match="weight has 7"):
        rms_norm(x, weight[:7], 1e-5, x)
    for wrong in (weight[:1], torch.rand(2, 8)):  # would be spread over the rows
        with pytest.raises(SpecError, match="x rows have 8"):
            rms_norm(x, wrong, 1e-5)
    with pytest.raises(SpecError, match="odd"):
        swiglu(x[:, :7])
    with pytest.raises(SpecError, match="odd"):
        rope(x[:, None, :7], torch.zeros(2, 1, 3), torch.zeros(2, 1, 3))
    with pytest.raises(SpecError, match="quantize is 'int4'"):
        rms_norm(x, weight, 1e-5, quantize="int4")  # type: ignore[arg-type]


def test_where_they_run() -> None:
    def norm(where: Where, dtype: torch.dtype, weight: torch.dtype, width: int, **options: bool) -> str:
        return choose("rms_norm", where, dtype=dtype, weight_dtype=weight, width=width, **options).backend

    half = torch.bfloat16
    assert norm(H200, half, half, 4096) == "triton"
    assert norm(H200, half, torch.float32, 4096) == norm(H200, half, half, 32768) == norm(H200, F64, F64, 64) == "torch"
    assert norm(Where(), half, half, 4096) == norm(H200, half, half, 4096, compiling=True) == "torch"
    for op in ("swiglu", "rope"):
        assert choose(op, H200, dtype=half).backend == "triton"
        assert choose(op, H200, dtype=F64).backend == choose(op, Where(), dtype=half).backend == "torch"
        assert choose(op, H200, compiling=True, dtype=half).backend == "torch"
    # What writes in place cannot be one kernel with its neighbours.
    assert choose("rope_write", H200, compiling=True, dtype=half).backend == "triton"
