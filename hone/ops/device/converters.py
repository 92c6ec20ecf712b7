"""Digital-to-analog and analog-to-digital converters: what rounding to their steps does to numbers."""

from __future__ import annotations

from torch import Tensor


def converted(values: Tensor, bits: int, bound: float = 1.0) -> Tensor:
    """`values` clipped to +-`bound` and rounded to the 2**bits - 1 steps of a converter whose range is that, symmetric about 0.

    With `bits` 0 there is no converter: values come back as they are, not clipped either.
    """
    if bits == 0:
        return values
    step = bound / max(2 ** (bits - 1) - 1, 1)
    return (values / step).round().mul(step).clamp(-bound, bound)


def scaled(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """`x` divided by its largest magnitude along `dim`, so that it fits a converter's range, and that scale (1 where all is 0)."""
    scale = x.abs().amax(dim, keepdim=True)
    scale = scale.masked_fill(scale == 0, 1.0)
    return x / scale, scale
