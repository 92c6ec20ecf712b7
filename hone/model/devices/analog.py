"""Weights as conductances of phase-change memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.model.devices.base import Counts, SimulatedDevice

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Analog(SimulatedDevice):
    """Tiles of phase-change memory: conductances are written with an error, drift and are read with noise. Rasch et al. 2023, arXiv:2302.08469."""

    paper: ClassVar[str] = "arXiv:2302.08469"

    after_s: float = Field(3600.0, ge=0, description="Seconds between writing the weights and the products.")
    drift_compensation: bool = Field(True, description="Multiply each tile by what its mean conductance has lost.")
    clip: float = Field(
        3.0, ge=0, description="Weights beyond this many root mean squares of their output are written as that; 0: no."
    )
    tile: int = Field(512, gt=0, description="Inputs of a tile.")
    dac_bits: int = Field(7, ge=0, le=16, description="Bits of an input; 0: no converter.")
    adc_bits: int = Field(9, ge=0, le=16, description="Bits of a tile's sum; 0: no converter.")
    output_bound: float = Field(
        12.0, gt=0, description="Largest sum of a tile, in units of its largest input times its largest weight."
    )
    output_noise: float = Field(0.06, ge=0, description="Standard deviation of a sum's noise, in the same units.")

    def hold(self, weight: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        from hone.ops.device.analog import programmed

        return programmed(
            weight,
            after_s=self.after_s,
            clip=self.clip,
            compensated=self.drift_compensation,
            generator=generator,
            tile=self.tile,
        )

    def product(self, x: Tensor, held: Tensor | tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, Counts]:
        from hone.ops.device.analog import analog_linear

        relative, scale = held
        y = analog_linear(
            x,
            relative,
            scale,
            tile=self.tile,
            dac_bits=self.dac_bits,
            adc_bits=self.adc_bits,
            output_bound=self.output_bound,
            output_noise=self.output_noise,
            generator=generator,
        )
        tokens, tiles = len(x), math.ceil(x.shape[1] / self.tile)
        return y, {
            "macs": tokens * relative.numel(),
            "dac_conversions": x.numel(),
            "adc_conversions": tokens * relative.shape[0] * tiles,
        }

    def noisy(self, weight: Tensor, generator: Generator) -> Tensor:
        """Clipped weights with the error of writing: what lasts for all products, and no drift, which is compensated."""
        from hone.ops.device.analog import pairs, written_noise

        _, _, scale = pairs(weight.detach(), self.clip)
        relative = (weight / scale).clamp(-1.0, 1.0)
        return (relative + written_noise(relative.detach(), generator)) * scale

    def rounded(self, x: Tensor) -> Tensor:
        """Inputs rounded as the DAC does, with slope 1 (straight-through)."""
        from hone.ops.device.converters import converted, scaled

        part, size = scaled(x.detach().float())
        return x + (converted(part, self.dac_bits) * size - x.detach()).to(x.dtype)
