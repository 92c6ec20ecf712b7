"""SwiGLU over the halves of each row, forward and backward; the backward computes the gate again."""

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(gate_up, out, gate_up_stride, width, BLOCK: tl.constexpr):
    """out [T, F] = silu(gate) * up of gate_up [T, 2F], BLOCK columns of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + at, mask=inside, other=0.0)
    # The reference rounds silu(gate) before it multiplies.
    active = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (active * up.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gate_up, upstream, grad, gate_up_stride, upstream_stride, width, BLOCK: tl.constexpr):
    """grad [T, 2F] from upstream [T, F] and the forward's input."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    flow = tl.load(upstream + row * upstream_stride + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    active = gate * share
    grad_gate = flow * up * (share + active * (1.0 - share))
    start = grad + row * 2 * width
    tl.store(start + at, grad_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(start + width + at, (flow * active).to(grad.dtype.element_ty), mask=inside)
