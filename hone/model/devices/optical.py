"""Products of light."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.model.devices.base import Counts, SimulatedDevice

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Optical(SimulatedDevice):
    """Blocks of codes multiplied by light, whose photons are counted with shot noise. Anderson et al. 2023, arXiv:2302.10360."""

    paper: ClassVar[str] = "arXiv:2302.10360"

    photons: float = Field(10.0, ge=0, description="Photons of a full-scale product at the detector; 0: no noise.")
    thermal: float = Field(1.0, ge=0, description="Electrons of a detector's own noise.")
    block: int = Field(128, gt=0, description="Inputs that share a scale and are summed by one detector.")
    input_bits: int = Field(8, ge=0, le=16, description="Bits of an input; 0: not rounded.")
    weight_bits: int = Field(8, ge=0, le=16, description="Bits of a weight; 0: not rounded.")
    output_bits: int = Field(11, ge=0, le=16, description="Bits of a block's sum; 0: not rounded.")

    def product(self, x: Tensor, held: Tensor | tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, Counts]:
        from hone.ops.device.optical import optical_linear

        assert not isinstance(held, tuple), "the weight itself is held"
        fields = {name: getattr(self, name) for name in _FIELDS}
        y, detected = optical_linear(x, held, **fields, generator=generator)
        tokens, blocks = len(x), math.ceil(x.shape[1] / self.block)
        return y, {
            "macs": tokens * held.numel(),
            "dac_conversions": x.numel() + held.numel(),
            "adc_conversions": tokens * held.shape[0] * blocks,
            "photons": int(detected),
        }

    def noisy(self, weight: Tensor, generator: Generator) -> Tensor:
        """Weights rounded to their codes, with a noise of a weight that gives sums about the shot noise of a mean input."""
        import torch

        from hone.ops.device.converters import converted, scaled

        relative, scale = scaled(weight.detach().float())
        noise = converted(relative, self.weight_bits) - relative
        if self.photons:
            spread = (relative.abs() / self.photons).sqrt()
            noise = noise + spread * torch.randn(relative.shape, generator=generator, device=weight.device)
        return weight + (noise * scale).to(weight.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """Inputs rounded to their codes, with slope 1 (straight-through)."""
        from hone.ops.device.converters import converted, scaled

        part, size = scaled(x.detach().float())
        return x + (converted(part, self.input_bits) * size - x.detach()).to(x.dtype)


_FIELDS = ("photons", "thermal", "block", "input_bits", "weight_bits", "output_bits")
