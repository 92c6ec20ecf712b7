"""Rounding of a linear's inputs to 8- and 4-bit numbers, as products of quantized activations compute it.

Shapes: x [..., K] inputs, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hone.ops.rounding.numbers import Number, ScaleFormat


@dataclass(frozen=True)
class Activations:
    """The rounding of a linear's inputs: one scale per token, for all or per group of columns, computed at run time or by
    calibration.

    Scales of groups are rounded to `scales`: e8m0 are powers of two, e4m3 are divided by a global scale, which is calibrated.
    """

    bits: int = 8
    number: Number = "int"
    dynamic: bool = True
    per: Literal["token", "tensor", "group"] = "token"
    symmetric: bool = True
    group_size: int = 0
    scales: ScaleFormat = "float"


ACTIVATIONS: dict[str, Activations] = {
    "int8_token": Activations(),
    "int8_token_asymmetric": Activations(symmetric=False),
    "int4_token": Activations(4),
    "int4_token_asymmetric": Activations(4, symmetric=False),
    "int8_tensor": Activations(dynamic=False, per="tensor"),
    "int8_tensor_asymmetric": Activations(dynamic=False, per="tensor", symmetric=False),
    "fp8_token": Activations(number="e4m3"),
    "fp8_tensor": Activations(number="e4m3", dynamic=False, per="tensor"),
    "fp8_group": Activations(number="e4m3", per="group", group_size=128),
    "nvfp4": Activations(4, "e2m1", per="group", group_size=16, scales="e4m3"),
    "mxfp4": Activations(4, "e2m1", per="group", group_size=32, scales="e8m0"),
    "mxfp8": Activations(8, "e4m3", per="group", group_size=32, scales="e8m0"),
}
"""Values of the option `activations` of quantizers."""

LARGEST = {"e2m1": 6.0, "e4m3": 448.0}
"""The largest value of the floating formats of inputs."""

_OFFSETS = {"e2m1": 2, "e4m3": 8}
"""floor(log2(LARGEST)): the largest exponent of the format."""

CODE_SHIFT = 256.0
"""Codes are divided by it before a product and scales multiplied: exact, and sums of e4m3 codes then fit float16."""


class Rounded(NamedTuple):
    """x rounded: `values` [..., K] in x's dtype, times `scales` float32 [..., 1] (None: 1)."""

    values: Tensor
    scales: Tensor | None


class Codes(NamedTuple):
    """x as numbers of its format: `codes` float [..., K]; x is about (codes - points) * scales, both [..., 1] or [1]."""

    codes: Tensor
    scales: Tensor
    points: Tensor | None


def tensors_of(activations: Activations | None) -> dict[str, torch.dtype]:
    """Dtype of every calibrated tensor [1] that a checkpoint module has beside its weight, by suffix. Names of compressed-tensors."""
    if activations is None:
        return {}
    if activations.scales == "e4m3":
        return {"input_global_scale": torch.float32}
    if activations.dynamic:
        return {}
    found = {"input_scale": torch.float32}
    return found if activations.symmetric else found | {"input_zero_point": torch.int8}


def static_tensors(activations: Activations, low: float, high: float) -> dict[str, Tensor]:
    """The tensors of `tensors_of` for inputs in [low, high], a range that is widened to include 0.

    The global scale is a divisor of the groups' scales: 448 * 6 / largest magnitude.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    largest = max(-low, high) or 1.0
    if activations.scales == "e4m3":
        return {"input_global_scale": torch.tensor([LARGEST["e4m3"] * LARGEST["e2m1"] / largest], dtype=torch.float32)}
    if activations.dynamic:
        return {}
    smallest, most = code_range(activations)
    if activations.symmetric:
        return {"input_scale": torch.tensor([largest * 2 / (most - smallest)], dtype=torch.float32)}
    scale = torch.tensor([((high - low) or 1.0) / (most - smallest)], dtype=torch.float32)
    point = (smallest - low / scale).round().clamp(smallest, most).to(torch.int8)
    return {"input_scale": scale, "input_zero_point": point}


def code_range(activations: Activations) -> tuple[float, float]:
    """Smallest and largest code."""
    if activations.number == "int":
        return -float(1 << (activations.bits - 1)), float((1 << (activations.bits - 1)) - 1)
    return -LARGEST[activations.number], LARGEST[activations.number]


def encode(x: Tensor, activations: Activations, given: Mapping[str, Tensor]) -> Codes:
    """x [..., K] as codes with one scale per token or for all; `given` holds the tensors of `tensors_of`.

    Computed in float32 (float64 for float64 x). A token's scale is its largest magnitude over half of the code range
    (127.5 for int8, 448 for e4m3), as in compressed-tensors; vLLM's kernels divide by 127 at run time.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = code_range(activations)
    points: Tensor | None = None
    if not activations.dynamic:
        scales = given["input_scale"].to(wide.dtype)
        points = None if activations.symmetric else given["input_zero_point"].to(wide.dtype)
    elif activations.symmetric:
        scales = _nonzero(wide.abs().amax(-1, keepdim=True) / ((high - low) / 2))
    else:
        least, most = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
        scales = _nonzero((most - least) / (high - low))
        points = (low - least / scales).round().clamp(low, high)
    steps = wide / scales
    if points is not None:
        steps += points
    return Codes(round_number(steps.clamp_(low, high), activations.number), scales, points)


def round_inputs(x: Tensor, activations: Activations, given: Mapping[str, Tensor]) -> Rounded:
    """x [..., K] rounded as `activations` says; `given` holds the tensors of `tensors_of`.

    With groups, K must be a multiple of the group size and the values have their scales, rounded once to x's dtype;
    otherwise the values are the codes, which every dtype of x holds.
    """
    if activations.per == "group":
        return Rounded(_round_groups(x, activations, given), None)
    codes, scales, points = encode(x, activations, given)
    codes = codes if points is None else codes - points
    return Rounded((codes / CODE_SHIFT).to(x.dtype), scales * CODE_SHIFT)


def _round_groups(x: Tensor, activations: Activations, given: Mapping[str, Tensor]) -> Tensor:
    """x [..., K] rounded with a scale for each group of columns."""
    assert x.shape[-1] % activations.group_size == 0, f"{x.shape[-1]} columns in groups of {activations.group_size}"
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, activations.group_size))
    largest, number = wide.abs().amax(-1, keepdim=True), activations.number
    if activations.scales == "e8m0":
        scales = power_scales(largest, number).to(wide.dtype)
    elif activations.scales == "e4m3":
        divisor = given["input_global_scale"].to(wide.dtype)
        scales = local_scales(largest, divisor).to(wide.dtype) / divisor
    else:
        scales = _nonzero(largest / LARGEST[number])
    steps = (wide / scales).clamp_(-LARGEST[number], LARGEST[number])
    return (round_number(steps, number) * scales).flatten(-2).to(x.dtype)


def round_number(x: Tensor, number: str) -> Tensor:
    """x, within the format's range, rounded to the nearest number of the format; ties to even mantissas. Dtype unchanged."""
    if number == "int":
        return x.round()
    if number == "e4m3":
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    assert number == "e2m1", f"inputs are not rounded to {number}"
    # Seven times as fast as a search in `numbers`' table, which gives codes.
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round_().mul_(step)


def local_scales(largest: Tensor, divisor: Tensor) -> Tensor:
    """NVFP4's scales of groups whose largest magnitude is `largest`, float8_e4m3fn: the values are scale / divisor.

    `divisor` float [1] is the global scale. Zero becomes 1/8, as in compressed-tensors.
    """
    scales = (largest * divisor / LARGEST["e2m1"]).clamp(max=LARGEST["e4m3"]).to(torch.float8_e4m3fn)
    return torch.where(scales.float() == 0, torch.full_like(largest, 0.125).to(torch.float8_e4m3fn), scales)


def power_scales(largest: Tensor, number: str) -> Tensor:
    """Scales of groups whose largest magnitude is `largest`, powers of two as float8_e8m0fnu.

    The exponent of `largest` less that of the format; one more where `largest` has a mantissa of 1.75 or more, which the
    format's largest value would clip. OCP Microscaling Formats 1.0; the mantissa's threshold is compressed-tensors'.
    """
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype) - _OFFSETS[number]
    exponent = torch.where(largest > 0, exponent, -127)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))
