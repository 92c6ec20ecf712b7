"""Norm, rotation and gate, each in one pass over memory: public functions, their GPU ops and gradients.

On a CPU and under torch.compile (which fuses them itself) they are plain torch. Legend: T tokens, D width, F width of a
feed-forward, H query heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hone.ops import lean, reference
from hone.ops.dispatch import backend_of

FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

Codes = Literal["fp8", "int8"]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quantize: Codes | None = None,
    *,
    backend: str | None = None,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., D]; arXiv:1910.07467.

    With `residual` (x's shape and dtype) x + residual is normed and returned too: (y, x + residual).
    With `quantize` y comes as codes, float8_e4m3fn or int8, and one float32 scale a row [..., 1] (the row's largest
    magnitude over 448 or 127): (codes, scales) or (codes, scales, x + residual); no gradient flows through codes.
    """
    plain = _plain(x) if backend is None else None
    if plain is not None and residual is None and quantize is None:
        return plain.rms_norm(x, weight, eps)
    if x.shape[-1] != weight.numel():
        raise ValueError(f"weight has {weight.numel()} values, x rows have {x.shape[-1]}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} is not like x {tuple(x.shape)} {x.dtype}")
    if quantize not in (None, "fp8", "int8"):
        raise ValueError(f"quantize is {quantize!r}; it may be None, 'fp8' or 'int8'")
    if plain is None:
        chosen = backend_of("rms_norm", x.device, backend, dtype=x.dtype, weight_dtype=weight.dtype, width=x.shape[-1])
        if chosen == "triton":
            return _rms_norm_triton(x, weight, eps, residual, quantize)
        plain = reference if chosen == "reference" else lean
    summed = x if residual is None else x + residual
    normed = plain.rms_norm(summed, weight, eps)
    if quantize is None:
        return normed if residual is None else (normed, summed)
    codes, scales = row_codes(normed.detach(), quantize)
    return (codes, scales) if residual is None else (codes, scales, summed)


def _plain(x: Tensor) -> Any:
    """The module of plain torch that serves where no kernel would: under torch.compile, and off the GPU; else None."""
    if torch.compiler.is_compiling():
        return reference
    return None if x.is_cuda else lean


def _bare(*given: Tensor | None) -> bool:
    """No gradient is wanted: the kernel may be launched without torch's dispatcher, most of a small call's time."""
    return not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given))


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: Codes | None) -> Any:
    if quantize is not None:
        codes, scales, summed = _norm_codes(x, weight, eps, residual, quantize == "fp8")
        return (codes, scales) if residual is None else (codes, scales, summed)
    run = _norm if _bare(x, weight, residual) else _norm_op
    y, summed, _ = run(x, weight, eps, residual)
    return y if residual is None else (y, summed)


def row_codes(x: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales [..., 1]) of x [..., D], a scale a row: the reference of `rms_norm`'s quantized output."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = FP8_LARGEST if kind == "fp8" else 127.0
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    steps = (wide / scales).clamp(-largest, largest)
    codes = steps.to(torch.float8_e4m3fn) if kind == "fp8" else steps.round().to(torch.int8)
    return codes, scales.float()


def swiglu(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202.

    Only its input is kept for the backward pass, which computes the gate again.
    """
    plain = _plain(gate_up) if backend is None else None
    if plain is None:
        chosen = backend_of("swiglu", gate_up.device, backend, dtype=gate_up.dtype)
        if chosen == "triton":
            return (_gate if _bare(gate_up) else _gate_op)(gate_up)
        plain = reference if chosen == "reference" else lean
    return plain.swiglu(gate_up)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool = False, backend: str | None = None) -> Tensor:
    """Turns the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]; arXiv:2104.09864.

    `in_place` overwrites x and returns it (serving: no gradient).
    """
    plain = _plain(x) if backend is None and not in_place else None
    if plain is None:
        chosen = backend_of("rope", x.device, backend, dtype=x.dtype)
        if chosen == "triton":
            if in_place:
                _rope_in_place_op(x, cos, sin)
                return x
            return (_rotated if _bare(x) else _rope_op)(x, cos, sin, 1.0)
        plain = reference if chosen == "reference" else lean
    turned = plain.rope(x, cos, sin)
    return x.copy_(turned) if in_place else turned


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Turns q [T, H, Dh] where it lies, and files turned k [T, KV, Dh] and v [T, KV, Dv] in the pages, in one pass.

    cos, sin [T, 1, Dh/2]; pages [num_pages, KV, page_size, Dh or Dv], token t at slot offsets[t] of page pages[t]
    (integers [T]; no place may come twice). No gradient.
    """
    chosen = backend_of("rope", q.device, backend or (None if q.is_cuda else "lean"), dtype=q.dtype)
    if chosen == "triton":
        _rope_write_op(q, k, v, cos, sin, k_pages, v_pages, pages, offsets)
        return
    turn = (reference if chosen == "reference" else lean).rope
    q.copy_(turn(q, cos, sin))
    k_pages[pages, :, offsets] = turn(k, cos, sin).to(k_pages.dtype)
    v_pages[pages, :, offsets] = v.to(v_pages.dtype)


# What the GPU runs: launches of hone.ops.triton.{norm,gate,rotary} as torch ops.


def _runs(x: Tensor) -> Tensor:
    """x [..., D] as [outer, inner, D] without a copy where its strides allow it (heads of a fused projection do)."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    try:
        return x.view(-1, 1, x.shape[-1])
    except RuntimeError:
        pass
    try:
        return x.flatten(0, -3) if x.dim() == 3 else x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return x.contiguous().view(-1, 1, x.shape[-1])


def _power(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def norm_shape(width: int) -> tuple[int, int, int]:
    """(ROWS, BLOCK, warps) of the norm kernels: a tile of at least 1024 values, 16 values a thread."""
    block = _power(width)
    rows = max(1, 1024 // block)
    return rows, block, max(2, min(16, rows * block // 512))


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual or empty, 1 / rms of each row, float32)."""
    from hone.ops.triton.norm import rms_norm_forward

    rows3 = _runs(x)
    before = rows3 if residual is None else _runs(residual)
    if before.shape != rows3.shape:
        rows3, before = x.contiguous().view(-1, 1, x.shape[-1]), residual.contiguous().view(-1, 1, x.shape[-1])
    y, summed, rstd = _norm_fake(x, weight, eps, residual)
    num_rows, width = rstd.numel(), x.shape[-1]
    if num_rows:
        rows, block, warps = norm_shape(width)
        rms_norm_forward[(-(-num_rows // rows),)](
            rows3, before, weight, y, summed, rstd, rstd,
            *rows3.stride()[:2], *before.stride()[:2], rows3.shape[1], num_rows, width, eps, 1.0,
            RESIDUAL=residual is not None, KEEPS=True, QUANTIZED=False, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, summed, rstd


_norm_op = torch.library.custom_op("hone::rms_norm", _norm, mutates_args=())


@_norm_op.register_fake
def _norm_fake(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = torch.empty_like(y) if residual is not None else x.new_empty(0)
    return y, summed, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("hone::rms_norm_codes", mutates_args=())
def _norm_codes(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales [..., 1], x + residual or empty)."""
    from hone.ops.triton.norm import rms_norm_forward

    rows3 = _runs(x)
    before = rows3 if residual is None else _runs(residual)
    if before.shape != rows3.shape:
        rows3, before = x.contiguous().view(-1, 1, x.shape[-1]), residual.contiguous().view(-1, 1, x.shape[-1])
    codes, scales, summed = _norm_codes_fake(x, weight, eps, residual, fp8)
    num_rows, width = scales.numel(), x.shape[-1]
    if num_rows:
        rows, block, warps = norm_shape(width)
        rms_norm_forward[(-(-num_rows // rows),)](
            rows3, before, weight, codes, summed, scales, scales,
            *rows3.stride()[:2], *before.stride()[:2], rows3.shape[1], num_rows, width, eps,
            FP8_LARGEST if fp8 else 127.0,
            RESIDUAL=residual is not None, KEEPS=False, QUANTIZED=True, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return codes, scales, summed


@_norm_codes.register_fake
def _norm_codes_fake(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=x.device)
    summed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else x.new_empty(0)
    return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), summed


BACKWARD_STAGES = 2
"""Tiles of rows that a program of the norm's backward pass has under way."""


@torch.library.custom_op("hone::rms_norm_backward", mutates_args=())
def _norm_backward_op(
    upstream: Tensor, upstream_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """(gradient by x, gradient by weight or empty)."""
    from hone.ops.triton.norm import rms_norm_backward

    rows3, flow = _runs(x), _runs(upstream)
    if rows3.shape != flow.shape:
        rows3, flow = x.contiguous().view(-1, 1, x.shape[-1]), upstream.contiguous().view(-1, 1, x.shape[-1])
    flow_sum = flow if upstream_sum is None else upstream_sum.contiguous()
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = rstd.numel(), x.shape[-1]
    rows, block, warps = norm_shape(width)
    programs = min(-(-num_rows // rows), norm_programs(x.device, block))
    partial = torch.empty(programs if wants_weight else 0, width, dtype=torch.float32, device=x.device)
    if num_rows:
        rms_norm_backward[(programs,)](
            flow, flow_sum, rows3, weight, rstd, grad_x, partial,
            *flow.stride()[:2], *rows3.stride()[:2], rows3.shape[1], num_rows, width,
            RESIDUAL=upstream_sum is not None, WEIGHT=wants_weight, ROWS=rows, BLOCK=block, STAGES=BACKWARD_STAGES, num_warps=warps,
        )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype) if wants_weight else weight.new_empty(0)


@_norm_backward_op.register_fake
def _norm_backward_fake(
    upstream: Tensor, upstream_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, torch.empty_like(weight) if wants_weight else weight.new_empty(0)


def norm_programs(device: torch.device, block: int) -> int:
    """Programs of the norm's backward pass: enough to fill the machine, few enough that their sums are small."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return num_sms * max(1, min(8, 16384 // block))


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, residual = inputs
    _, summed, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(summed if ctx.has_residual else x, weight, rstd)
    ctx.set_materialize_grads(False)


def _norm_grad(ctx: Any, upstream: Tensor | None, upstream_sum: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    if upstream is None:
        return upstream_sum, None, None, upstream_sum if ctx.has_residual else None
    flow_sum = upstream_sum if ctx.has_residual else None
    grad_x, grad_weight = _norm_backward_op(upstream, flow_sum, x, weight, rstd, ctx.needs_input_grad[1])
    return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, grad_x if ctx.has_residual else None


_norm_op.register_autograd(_norm_grad, setup_context=_norm_setup)


def _gate(gate_up: Tensor) -> Tensor:
    from hone.ops.triton.gate import swiglu_forward

    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = _gate_fake(gate_up)
    width = out.shape[-1]
    if out.numel():
        block, warps = GATE_BLOCK
        swiglu_forward[(len(rows), -(-width // block))](rows, out, rows.stride(0), width, BLOCK=block, num_warps=warps)
    return out


GATE_BLOCK = (2048, 4)
"""(columns a program, warps) of the gate's kernels."""


_gate_op = torch.library.custom_op("hone::swiglu", _gate, mutates_args=())


@_gate_op.register_fake
def _gate_fake(gate_up: Tensor) -> Tensor:
    return torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)


@torch.library.custom_op("hone::swiglu_backward", mutates_args=())
def _gate_backward_op(gate_up: Tensor, upstream: Tensor) -> Tensor:
    from hone.ops.triton.gate import swiglu_backward

    rows, flow = gate_up.reshape(-1, gate_up.shape[-1]), upstream.reshape(-1, upstream.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    flow = flow if flow.stride(-1) == 1 else flow.contiguous()
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    width = flow.shape[-1]
    if grad.numel():
        block, warps = GATE_BLOCK
        swiglu_backward[(len(rows), -(-width // block))](
            rows, flow, grad, rows.stride(0), flow.stride(0), width, BLOCK=block, num_warps=warps
        )
    return grad


@_gate_backward_op.register_fake
def _gate_backward_fake(gate_up: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


_gate_op.register_autograd(
    lambda ctx, upstream: _gate_backward_op(ctx.saved_tensors[0], upstream),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def _angles(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as [rows, Dh/2], where token t of x takes row t % rows; copies only if they neither match nor repeat."""
    half, lead = x.shape[-1] // 2, x.shape[:-2]
    if cos.shape[-2:] != (1, half) or sin.shape != cos.shape:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not turn x {tuple(x.shape)}")
    kept = list(cos.shape[:-2])
    while kept and kept[0] == 1:
        kept.pop(0)
    if kept != list(lead[len(lead) - len(kept) :]):
        cos, sin = cos.expand(*lead, 1, half), sin.expand(*lead, 1, half)
    return cos.reshape(-1, half).contiguous(), sin.reshape(-1, half).contiguous()


def _tokens(x: Tensor) -> Tensor:
    """x [..., heads, Dh] as [T, heads, Dh]; a view, or an error where it would be a copy."""
    assert x.stride(-1) == 1, "the last axis must be contiguous"
    return x.view(-1, *x.shape[-2:])


def _turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    from hone.ops.triton.rotary import rope_rows

    cos, sin = _angles(x, cos, sin)
    source, target = _tokens(x), _tokens(out)
    num_tokens, num_heads, head_dim = source.shape
    heads, block, warps = rope_shape(num_heads, head_dim)
    if num_tokens:
        rope_rows[(num_tokens, -(-num_heads // heads))](
            source, target, cos, sin, *source.stride()[:2], *target.stride()[:2],
            cos.stride(0), len(cos), num_heads, head_dim // 2, sign, HEADS=heads, HALF=block, num_warps=warps,
        )  # fmt: skip


def rope_shape(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(HEADS, HALF, warps) of the rotary kernels: at most 2048 pairs a program."""
    block = _power(head_dim // 2)
    heads = min(_power(num_heads), max(1, 2048 // block))
    return heads, block, max(1, min(4, heads * block // 256))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    try:
        _tokens(x)
    except RuntimeError:
        x = x.contiguous()
    out = _rope_fake(x, cos, sin, sign)
    _turn(x, out, cos, sin, sign)
    return out


_rope_op = torch.library.custom_op("hone::rope", _rotated, mutates_args=())


@_rope_op.register_fake
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sign = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


_rope_op.register_autograd(
    lambda ctx, upstream: (_rope_op(upstream, *ctx.saved_tensors, -ctx.sign), None, None, None),
    setup_context=_rope_setup,
)


@torch.library.custom_op("hone::rope_in_place", mutates_args=("x",))
def _rope_in_place_op(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _turn(x, x, cos, sin, 1.0)


@torch.library.custom_op("hone::rope_write", mutates_args=("q", "k_pages", "v_pages"))
def _rope_write_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    offsets: Tensor,
) -> None:
    from hone.ops.triton.rotary import rope_write as kernel

    cos, sin = _angles(q, cos.expand(len(q), 1, -1), sin.expand(len(q), 1, -1))
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, value_width = v.shape[1:]
    heads, block, warps = rope_shape(num_heads, head_dim)
    parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    if num_tokens:
        kernel[(num_tokens, parts)](
            q, k, v, cos, sin, k_pages, v_pages, pages, offsets,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), *k_pages.stride()[:3],
            *v_pages.stride()[:3], num_heads, num_kv_heads, head_dim // 2, value_width,
            HEADS=heads, HALF=block, VALUES=_power(value_width), num_warps=warps,
        )  # fmt: skip


@_rope_in_place_op.register_fake
def _rope_in_place_fake(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


@_rope_write_op.register_fake
def _rope_write_fake(*given: Tensor) -> None:
    return None
