"""Blocks of GGUF: float weights to codes and scales, codes and scales to bytes, and back.

Shapes: N rows, K columns, B blocks (N * K / block), G groups of a block, g weights of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.exports.gguf.formats import SCALE_BYTES, Format, Plane
from hone.exports.gguf.ranges import divide, fit_ranges, fit_scales, fit_super_ranges, half

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Blocks:
    """What the bytes of blocks say: `codes` int16 [B, block]; `d` and `m` float16 [B, 1]; with integer scales, `scales` and
    `minima` int16 [B, G]. A weight is d * scale * code - m * minimum, or without integer scales d * code + m."""

    codes: Tensor
    d: Tensor
    m: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None

    def weights(self) -> Tensor:
        """The weights, float32 [B, block], rounded as ggml rounds them."""
        d = self.d.float()
        if self.scales is None:
            product = self.codes.float() * d
            return product if self.m is None else product + self.m.float()
        codes = self.codes.view(len(d), self.scales.shape[1], -1).float()
        found = codes * (d * self.scales.float()).unsqueeze(-1)
        if self.m is not None and self.minima is not None:
            found = found - (self.m.float() * self.minima.float()).unsqueeze(-1)
        return found.view(self.codes.shape)


def encode(weights: Tensor, form: Format, importance: Tensor | None = None) -> Tensor:
    """The bytes uint8 [N, bytes of a row] of weights float32 [N, K] in `form`.

    `importance` float32 [K] weights the squared errors of the columns (the mean square of their inputs).
    """
    if not form.parts:
        return weights.to(_PLAIN[form.name]).contiguous().view(torch.uint8)
    return to_bytes(fit(weights, form, importance), form).view(len(weights), -1)


def decode(stored: Tensor, form: Format) -> Tensor:
    """The weights float32 [N, K] in bytes uint8 [N, bytes of a row]."""
    if not form.parts:
        return stored.contiguous().view(_PLAIN[form.name]).float()
    return from_bytes(stored.reshape(-1, form.block_bytes), form).weights().view(len(stored), -1)


def repack(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """The bytes of signed codes int8 [N, K] with scales float [N, G'], one for each K / G' columns: no code changes.

    The form has one float16 scale for each block, which must not extend over two of the scales. The caller checks that
    float16 holds the scales.
    """
    rows, columns = codes.shape
    assert not form.minimum and not form.scale_bits and columns // scales.shape[1] % form.block == 0, form.name
    repeated = scales.to(torch.float16).repeat_interleave(columns // form.block // scales.shape[1], 1)
    blocks = Blocks(codes.reshape(-1, form.block).to(torch.int16), repeated.reshape(-1, 1))
    return to_bytes(blocks, form).view(rows, -1)


def fit(weights: Tensor, form: Format, importance: Tensor | None = None) -> Blocks:
    """Codes and scales of least (weighted) squared error, as far as a search finds them, for weights float32 [N, K]."""
    grouped = weights.reshape(-1, form.block // form.group, form.group)
    weighted = None
    if importance is not None:
        weighted = importance.to(weights).expand_as(weights).reshape(grouped.shape)
    if form.minimum and form.scale_bits:
        top = (1 << form.scale_bits) - 1
        found = fit_super_ranges(grouped, form.code_range[1], top, weighted)
        return Blocks(found.codes.flatten(1), found.d, found.m, found.scales, found.minima)
    if form.minimum:
        scale, low = fit_ranges(grouped, form.code_range[1], weighted, below_zero=False)
        d, m = half(scale), half(low)
        codes = _rounded(grouped - m.float().unsqueeze(-1), d.float().unsqueeze(-1), form)
        return Blocks(codes.flatten(1), d, m)
    if form.bits == 8:  # the textbook scale, for which no code is -128
        scales = grouped.abs().amax(-1) / form.code_range[1]
    else:
        scales = fit_scales(grouped, form.bits, weighted)
    if not form.scale_bits:
        d = half(scales)
        return Blocks(_rounded(grouped, d.float().unsqueeze(-1), form).flatten(1), d)
    lowest = -(1 << (form.scale_bits - 1))
    d = half(scales.gather(1, scales.abs().argmax(1, keepdim=True)) / lowest)
    whole = divide(scales, d.float()).round_().clamp_(lowest, -lowest - 1)
    codes = _rounded(grouped, (d.float() * whole).unsqueeze(-1), form)
    return Blocks(codes.flatten(1), d, scales=whole.to(torch.int16))


def to_bytes(blocks: Blocks, form: Format) -> Tensor:
    """uint8 [B, bytes of a block]."""
    stored = (blocks.codes + form.offset).bitwise_and_(255).to(torch.uint8)
    parts = []
    for part in form.parts:
        if isinstance(part, Plane):
            parts.append(_pack(stored, part))
        elif part == "d":
            parts.append(blocks.d.view(torch.uint8))
        elif part == "m":
            assert blocks.m is not None, "a format with minima has m"
            parts.append(blocks.m.view(torch.uint8))
        else:
            assert blocks.scales is not None, "a format with integer scales has them"
            parts.append(_pack_scales(blocks.scales, blocks.minima, part))
    return torch.cat(parts, 1)


def from_bytes(stored: Tensor, form: Format) -> Blocks:
    """The inverse of `to_bytes`: uint8 [B, bytes of a block]."""
    found: dict[str, Tensor] = {}
    codes = torch.zeros(len(stored), form.block, dtype=torch.uint8)
    begin = 0
    for part in form.parts:
        size = form.block * part.bits // 8 if isinstance(part, Plane) else SCALE_BYTES[part]
        piece = stored[:, begin : begin + size].contiguous()
        begin += size
        if isinstance(part, Plane):
            codes |= _unpack(piece, part)
        elif part in ("d", "m"):
            found[part] = piece.view(torch.float16)
        else:
            found |= _unpack_scales(piece, part)
    signed = codes.view(torch.int8) if form.bits == 8 else codes
    return Blocks(signed.to(torch.int16) - form.offset, **found)


def _rounded(weights: Tensor, steps: Tensor, form: Format) -> Tensor:
    """Codes int16 nearest to `weights`, in steps that may be zero or negative."""
    return divide(weights, steps).round_().clamp_(*form.code_range).to(torch.int16)


def _pack(stored: Tensor, plane: Plane) -> Tensor:
    """The bytes of one plane of unsigned codes uint8 [B, block]."""
    each = 8 // plane.bits
    runs = (stored >> plane.first & (1 << plane.bits) - 1).view(len(stored), -1, each, plane.width)
    packed = runs[:, :, 0].clone()
    for place in range(1, each):
        packed |= runs[:, :, place] << place * plane.bits
    return packed.flatten(1)


def _unpack(packed: Tensor, plane: Plane) -> Tensor:
    """The inverse of `_pack`: codes whose other bits are zero."""
    each, mask = 8 // plane.bits, (1 << plane.bits) - 1
    runs = packed.view(len(packed), -1, 1, plane.width)
    shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8).view(each, 1)
    return ((runs >> shifts & mask) << plane.first).flatten(1)


def _pack_scales(scales: Tensor, minima: Tensor | None, part: str) -> Tensor:
    """The bytes of the integer scales int16 [B, G], and minima, of a block."""
    if part == "octets":
        return scales.to(torch.int8).view(torch.uint8)
    if part == "signed_sixes":  # low nibbles of 0-7 and 8-15, then the high pairs of 0-3, 4-7, 8-11, 12-15
        plain = (scales + 32).to(torch.uint8)
        return torch.cat([_pack(plain, Plane(0, 4, 8)), _pack(plain, Plane(4, 2, 4))], 1)
    assert minima is not None, "a format with minima has integers of them"
    scales, minima = scales.to(torch.uint8), minima.to(torch.uint8)
    if part == "nibbles":
        return scales | minima << 4
    first = [(both[:, :4] | both[:, 4:] >> 4 << 6) for both in (scales, minima)]
    return torch.cat([*first, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], 1)


def _unpack_scales(packed: Tensor, part: str) -> dict[str, Tensor]:
    """The inverse of `_pack_scales`, by field of `Blocks`."""
    if part == "octets":
        return {"scales": packed.view(torch.int8).to(torch.int16)}
    if part == "signed_sixes":
        plain = _unpack(packed[:, :8].contiguous(), Plane(0, 4, 8))
        plain |= _unpack(packed[:, 8:].contiguous(), Plane(4, 2, 4))
        return {"scales": plain.to(torch.int16) - 32}
    if part == "nibbles":
        return {"scales": (packed & 15).to(torch.int16), "minima": (packed >> 4).to(torch.int16)}
    first, second, last = packed.split(4, 1)
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1)
    return {"scales": scales.to(torch.int16), "minima": minima.to(torch.int16)}
