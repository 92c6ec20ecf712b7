"""NVFP4: 4-bit floats, with an 8-bit float scale for every 16 columns and one scale for the whole matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.compress.quantizers.microscaling import Microscaling

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Stored


class NVFP4(Microscaling):
    """Rounds to 4-bit floats (e2m1) with an 8-bit float as the scale of 16 columns and one for the matrix; projections that are one matrix here (q, k, v) share it. NVIDIA 2025, arXiv:2509.25149."""

    paper: ClassVar[str] = "arXiv:2509.25149"
    bits: ClassVar[int] = 4
    number: ClassVar[str] = "e2m1"
    group_size: ClassVar[int] = 16
    layout: ClassVar[str] = "nvfp4-pack-quantized"
    scales: ClassVar[str] = "e4m3"
    candidates: ClassVar[int] = 13

    def stored(self, weights: Tensor, importance: Tensor | None) -> Stored:
        """As `Microscaling.stored`."""
        from hone.ops.rounding.float_grid import find_scales, global_scale_of

        divisor = global_scale_of(weights)
        given = {"divisor": divisor, "importance": importance}
        scales = find_scales(weights, self.number, self.group_size, self.scale, **given)
        return self.scheme(weights.shape[1]).quantize(weights, scales, None, divisor)
