"""Matrix products of linear layers: dense, integer weights and fp8; public functions and their GPU ops.

Legend: M rows of x, N output features, K input features, G groups of columns that share a scale, S parts of K.
A row's result does not depend on the other rows; it does depend (in its last bit) on M where M decides the kernel or
how K is split.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import formats
from hone.ops.activation.api import swiglu
from hone.ops.dispatch import backend_of
from hone.ops.linear import reference
from hone.ops.linear.cpu_weights import CpuWeight, block_weight, byte_weight, dense_weight, pack_blocks
from hone.ops.linear.reference import FP8_BLOCK
from hone.ops.linear.shapes import fp8_shape, quantized_shape, skinny_shape

FP8 = torch.float8_e4m3fn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N]; float sums in every dtype.

    Few rows without gradients run in a kernel bound by reading the weight; all else is torch's product. All tensors have
    one floating dtype unless autocast is on. Raises SpecError for shapes that do not fit.
    """
    _check_features(x, weight, bias)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    case = {
        "dtype": _product_dtype(x, weight, bias),
        "rows": x.numel() // max(1, x.shape[-1]),
        "out_features": weight.shape[0],
        "in_features": weight.shape[1],
        "in_rows": weight.stride(1) == 1,
        "plain": not (wants_grad or torch.is_autocast_enabled(x.device.type)),
    }
    chosen = backend_of("linear", x.device, backend, **case)
    if chosen == "compiled":
        from hone.ops.linear.cpu_product import product

        return product(x, dense_weight(weight, bias))
    return _skinny_op(x, weight, bias) if chosen == "triton" else F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(x w_gate^T) * (x w_up^T): x [..., R], weight [2F, R] with the gate's rows first, [..., F]. arXiv:2002.05202.

    Many rows without gradients run in one kernel on Hopper, which does not write the product to memory; all else is
    `linear`, then `swiglu`. Both round the product and the gate to x's dtype. Raises SpecError for shapes that do not fit.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or len(weight) % 2:
        raise SpecError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in columns, or the weight has no two halves of rows",
            fix="give x [..., R] and weight [2F, R]: the gate's F rows, then the up projection's",
        )
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chosen = backend_of(
        "gated_linear",
        x.device,
        backend,
        dtype=x.dtype if x.dtype == weight.dtype else None,
        rows=x.numel() // max(1, x.shape[-1]),
        features=len(weight) // 2,
        in_features=weight.shape[1],
        in_rows=weight.stride(1) == 1 and weight.stride(0) % 8 == 0,
        plain=not (wants_grad or torch.is_autocast_enabled(x.device.type)),
    )
    if chosen != "gluon":
        return swiglu(linear(x, weight))
    return (_gated_op if torch.compiler.is_compiling() else _gated)(x, weight)


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    out_features: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """x [..., K] times a weight of integer codes and scales, plus bias [N]: [..., N] in x's dtype. No gradient to weights.

    Takes plain codes int8 [N, K] with scales [N, G] (the reference, and the kernel of CPUs for `bits` 8; for 4 it packs them
    first), or the results of `formats.tile_codes` and `tile_scales` for `bits` 4 or 8 (the kernels of GPUs; `out_features`
    is N, because tiles are padded). The weight is code times
    scale, rounded to x's dtype as in `formats.dequantize`; with one scale per row the outputs are scaled instead.
    Differentiable in x, in plain torch. Raises SpecError naming the argument that does not fit.
    """
    tiled = codes.dim() == 4
    num_rows = codes.shape[0] if out_features is None else out_features
    _check_codes(x, codes, scales, bits, num_rows, tiled)
    _check_bias(bias, num_rows)
    case = {
        "dtype": x.dtype,
        "rows": x.numel() // max(1, x.shape[-1]),
        "bits": bits,
        "group_size": x.shape[-1] // (len(scales) if tiled else scales.shape[1]),
        "in_features": x.shape[-1],
        "tiled": tiled,
        "plain": not (torch.is_grad_enabled() and x.requires_grad),
    }
    chosen = backend_of("quantized_linear", x.device, backend, **case)
    if chosen == "gluon":
        return _quantized_op(x, codes, scales, bias, bits, num_rows)
    if chosen == "compiled":
        return cpu_quantized(x, codes_weight(codes, scales, bias, bits))
    if tiled:
        codes, scales = formats.untile_codes(codes, num_rows, bits), formats.untile_scales(scales, num_rows)
    return reference.quantized_linear(x, codes, scales, bias)


def codes_weight(codes: Tensor, scales: Tensor, bias: Tensor | None, bits: int) -> CpuWeight:
    """The weight of plain codes int8 [N, K] and scales [N, G] as the CPU's kernel reads it; 4 bits are packed."""
    if bits == 8:
        return byte_weight(codes.contiguous(), scales, bias)
    return block_weight(pack_blocks(codes), scales, codes.shape[1], bias)


def cpu_quantized(x: Tensor, weight: CpuWeight) -> Tensor:
    """`quantized_linear` of a weight that is held as the CPU's kernel reads it, where `choose` says 'compiled'."""
    from hone.ops.linear.cpu_product import product

    return product(x, weight)


def cpu_unpacked(weight: CpuWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Rows of a weight in 4-bit blocks as [n, K] in `dtype`, by a compiled kernel; valid until this thread's next call."""
    from hone.ops.linear.cpu_product import unpacked

    return unpacked(weight, rows, dtype)


def fp8_codes(x: Tensor, kind: Literal["row", "1x128", "128x128"] = "row") -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 codes [M, K] and float32 scales: per row [M], per 128 columns of a row [M, K/128], or per 128 x 128.

    A scale is the largest magnitude over 448, and 1 for zeros. The blockwise recipe is DeepSeek-V3's
    (arXiv:2412.19437): x in 1x128, weights in 128x128 (scales [ceil(M/128), K/128]).
    """
    if kind not in ("row", "1x128", "128x128"):
        raise SpecError(f"kind is {kind!r}; it may be 'row', '1x128' or '128x128'", fix="leave kind out for 'row'")
    if x.dim() != 2 or x.shape[1] == 0 or (kind != "row" and x.shape[1] % FP8_BLOCK):
        by = f"columns in multiples of {FP8_BLOCK}" if kind != "row" else "one or more columns"
        raise SpecError(
            f"x has shape {tuple(x.shape)}; {kind} needs two axes and {by}",
            fix=f"flatten x to [M, K]{'' if kind == 'row' else ', and pad K or use row, one scale per row'}",
        )
    rows, columns = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    high, wide_by = {"row": (1, columns), "1x128": (1, FP8_BLOCK), "128x128": (FP8_BLOCK, FP8_BLOCK)}[kind]
    blocks = F.pad(wide, (0, 0, 0, -rows % high)).view(-1, high, columns // wide_by, wide_by)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / formats.LARGEST[FP8], 1.0)
    codes = (
        (blocks / scales[:, None, :, None])
        .clamp(-formats.LARGEST[FP8], formats.LARGEST[FP8])
        .to(FP8)
        .view(-1, columns)[:rows]
    )
    return codes, (scales.view(-1) if kind == "row" else scales).float()


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x e4m3 [M, K] times weight e4m3 [N, K] transposed, both with their scales, plus bias [N]: [M, N] in `dtype`.

    Row-wise: x_scales [M], weight_scales [N]. Block-wise: x_scales [M, K/128], weight_scales [ceil(N/128), K/128].
    Sums over every 128 columns are added in float32; `fast` lets a library's product with many rows keep them in the
    tensor cores' accumulators of about 14 bits, as serving engines do. Both may be int8, row-wise. No gradient. Raises SpecError naming the argument that does not fit.
    """
    blockwise = x_scales.dim() == 2
    _check_fp8(x, x_scales, weight, weight_scales, bias, blockwise)
    integer = x.dtype == torch.int8
    case = {"rows": len(x), "out_features": len(weight), "in_features": x.shape[1], "blockwise": blockwise}
    case["integer"] = integer
    chosen = backend_of("fp8_linear", x.device, backend, dtype=dtype, **case)
    if chosen == "triton":
        return _fp8_op(x, x_scales, weight, weight_scales, bias, dtype)
    if chosen == "torch" and integer:
        sums = torch._int_mm(x, weight.T).to(torch.promote_types(dtype, torch.float32))
        out = sums.mul_(x_scales[:, None]).mul_(weight_scales)
        return (out if bias is None else out.add_(bias)).to(dtype)
    if chosen == "torch":
        return torch._scaled_mm(
            x, weight.T, scale_a=x_scales[:, None], scale_b=weight_scales[None, :], bias=bias, out_dtype=dtype,
            use_fast_accum=fast,
        )  # fmt: skip
    return reference.fp8_linear(x, x_scales, weight, weight_scales, bias, dtype)


# The GPU path: the Triton and Gluon kernels as torch ops.


@torch.library.custom_op("hone::skinny_linear", mutates_args=())
def _skinny_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from hone.ops.linear.triton_skinny import skinny_product

    rows, weight, bias = _rows(x), _in_rows(weight), None if bias is None else bias.contiguous()
    shape = skinny_shape(max(1, len(rows)), *weight.shape)
    return skinny_product(rows, weight, bias, shape).view(*x.shape[:-1], len(weight))


@_skinny_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    from hone.ops.linear.gluon_gated import gated

    return gated(_rows(x), weight).view(*x.shape[:-1], len(weight) // 2)


_gated_op = torch.library.custom_op("hone::gated_linear", _gated, mutates_args=())


@_gated_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@torch.library.custom_op("hone::quantized_linear", mutates_args=())
def _quantized_op(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, bits: int, out_features: int
) -> Tensor:
    from hone.ops.linear.gluon_quantized import quantized_product

    rows, bias = _rows(x), None if bias is None else bias.contiguous()
    codes, scales = codes.contiguous(), scales.contiguous()
    group_size = 0 if len(scales) == 1 else x.shape[-1] // len(scales)
    shape = quantized_shape(max(1, len(rows)), out_features, x.shape[-1], bits, group_size)
    out = quantized_product(rows, codes, scales, bias, bits, out_features, shape)
    return out.view(*x.shape[:-1], out_features)


@_quantized_op.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, bits: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.custom_op("hone::fp8_linear", mutates_args=())
def _fp8_op(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    from hone.ops.linear.triton_fp8 import fp8_rows_product

    shape = fp8_shape(max(1, len(x)), *weight.shape, blockwise=x_scales.dim() == 2)
    bias = None if bias is None else bias.contiguous()
    return fp8_rows_product(_rows(x), x_scales, _in_rows(weight), weight_scales, bias, dtype, shape)


@_fp8_op.register_fake
def _(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as rows [M, K] whose starts are 16-byte aligned, copied only where they are not."""
    rows = x.reshape(-1, x.shape[-1])
    wide = 16 // x.element_size()
    if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) % wide) or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


def _in_rows(weight: Tensor) -> Tensor:
    """weight [N, K], copied only if its rows are not contiguous: kernels take one stride."""
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _check_features(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise SpecError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in columns",
            fix="give x [..., K] and weight [N, K], output features first",
        )
    _check_bias(bias, weight.shape[0])


def _check_bias(bias: Tensor | None, out_features: int) -> None:
    if bias is not None and bias.shape != (out_features,):
        raise SpecError(
            f"bias has shape {tuple(bias.shape)}, not ({out_features},)",
            fix=f"give one number per output feature, {out_features} in all, or None",
        )


def _check_codes(x: Tensor, codes: Tensor, scales: Tensor, bits: int, num_rows: int, tiled: bool) -> None:
    if tiled:
        if codes.dtype != torch.int32 or bits not in (4, 8):
            raise SpecError(
                f"codes are {codes.dtype} of {bits} bits; tiles are int32 words of 4 or 8 bits",
                fix="give the result of formats.tile_codes, and the bits it was called with",
            )
        columns, groups, rows = codes.shape[1] * 256 // bits, scales.shape[0], codes.shape[0] * 64
        if scales.dim() != 4 or scales.shape[1] * 16 != rows or not 0 <= rows - num_rows < formats.TILE_ROWS:
            raise SpecError(
                f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} are not tiles of {num_rows} rows",
                fix="give the results of formats.tile_codes and tile_scales for one weight, and its rows as out_features",
            )
    else:
        if codes.dtype != torch.int8 or codes.dim() != 2 or len(codes) != num_rows:
            raise SpecError(
                f"codes are {codes.dtype} {tuple(codes.shape)}; plain codes are int8 [N, K], N = {num_rows}",
                fix="give int8 [N, K], one code a byte, and leave out_features out",
            )
        columns, groups = codes.shape[1], scales.shape[-1]
        if scales.dim() != 2 or len(scales) != num_rows:
            raise SpecError(
                f"scales {tuple(scales.shape)} do not belong to codes {tuple(codes.shape)}",
                fix=f"give scales [{num_rows}, G], G groups of columns a row",
            )
    if x.shape[-1] != columns or not groups or columns % groups:
        raise SpecError(
            f"x {tuple(x.shape)} does not fit codes of {columns} columns with {groups} scales per row",
            fix="give x as many columns as codes have, and a number of scales per row that divides them",
        )


def _check_fp8(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, blockwise: bool
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise SpecError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [M, K] and [N, K]",
            fix="flatten x to rows, and give weight output features first",
        )
    if x.dtype != weight.dtype or x.dtype not in (FP8, torch.int8) or (blockwise and x.dtype != FP8):
        raise SpecError(
            f"x is {x.dtype} and weight {weight.dtype}; both must be {FP8}, or int8 with a scale for each row",
            fix="give the codes that fp8_codes makes of them",
        )
    (rows, columns), features = x.shape, len(weight)
    if blockwise and columns % FP8_BLOCK:
        raise SpecError(
            f"x_scales {tuple(x_scales.shape)} are block-wise, and {columns} columns do not divide into blocks of {FP8_BLOCK}",
            fix=f"pad the columns to a multiple of {FP8_BLOCK}, or give one scale per row: x_scales [M], weight_scales [N]",
        )
    wanted: dict[str, Any] = {"x_scales": (rows,), "weight_scales": (features,)}
    if blockwise:
        blocks = columns // FP8_BLOCK
        wanted = {"x_scales": (rows, blocks), "weight_scales": (-(-features // FP8_BLOCK), blocks)}
    for name, scales in (("x_scales", x_scales), ("weight_scales", weight_scales)):
        if scales.shape != wanted[name] or scales.dtype != torch.float32:
            raise SpecError(
                f"{name} are {scales.dtype} {tuple(scales.shape)}, not float32 {wanted[name]}",
                fix="give both scales as fp8_codes returns them: 'row' for both, or '1x128' for x and '128x128' for weight",
            )
    _check_bias(bias, features)


def _product_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The common dtype, None where they differ (torch's product then raises)."""
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return x.dtype if same else None
