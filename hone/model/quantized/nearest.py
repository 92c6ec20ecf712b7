"""Weights rounded to a scheme's nearest numbers, with scales from the largest: as exported, and as a training computes with them.

Shapes: N output features (rows), K input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.model.quantized.scheme import Scheme, Stored
from hone.ops.formats import LARGEST
from hone.ops.rounding.float_grid import find_scales, global_scale_of
from hone.ops.rounding.integer_grid import float16_holds, stored


def scale_dtype(checkpoint: torch.dtype) -> torch.dtype:
    """The dtype of scales where none is asked for: the checkpoint's, or float16 for a float32 checkpoint."""
    return torch.float16 if checkpoint == torch.float32 else checkpoint


def all_held(scales: Tensor, modules: Sequence[int]) -> bool:
    """Whether float16 holds the scales of each checkpoint module, of which `scales` [N, ...] or fewer rows stack `modules` rows each."""
    parts = scales.split(list(modules)) if len(scales) == sum(modules) else (scales,)
    return all(float16_holds(part) for part in parts)


def float_scales(weights: Tensor, scheme: Scheme) -> Tensor:
    """Scales [R, G] that make the largest weight of each of the scheme's blocks the largest 8-bit float."""
    (high, wide), (down, across) = scheme.extent(*weights.shape), scheme.grid(*weights.shape)
    padded = torch.nn.functional.pad(weights.abs(), (0, -weights.shape[1] % wide, 0, -len(weights) % high))
    return padded.view(down, high, across, wide).amax((1, 3)) / LARGEST[torch.float8_e4m3fn]


def nearest_floats(weights: Tensor, scheme: Scheme, dtype: torch.dtype) -> Stored:
    """Weights [N, K] on the grid of `float_scales`, which are stored in `dtype`."""
    return scheme.quantize(weights, stored(float_scales(weights, scheme), dtype))


def nearest_in_groups(weights: Tensor, scheme: Scheme) -> Stored:
    """Weights [N, K] on the grid of a microscaling format: scales of one byte, of NVFP4 with a global one."""
    divisor = global_scale_of(weights) if scheme.scales == "e4m3" else None
    scales = find_scales(weights, scheme.number, scheme.group_size, "absmax", divisor=divisor)
    return scheme.quantize(weights, scales, None, divisor)
