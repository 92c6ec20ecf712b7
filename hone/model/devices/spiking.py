"""Spikes instead of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hone.model.devices.base import Counts, SimulatedDevice

if TYPE_CHECKING:
    from torch import Generator, Tensor


MOST_BITS = 24
"""Of a binary code: float32 holds no more."""


class Spiking(SimulatedDevice):
    """Inputs as spikes of integrate-and-fire neurons in T steps, which only add weights. Diehl et al. 2015, doi:10.1109/IJCNN.2015.7280696."""

    paper: ClassVar[str] = "doi:10.1109/IJCNN.2015.7280696"

    steps: int = Field(16, gt=0, le=1024, description="Time steps of a product, T.")
    code: Literal["rate", "binary"] = Field(
        "rate",
        description="rate: all spikes weigh the same, T levels; binary: step t weighs 2^(T-1-t), so that T bits are carried exactly.",
    )
    percentile: float = Field(
        99.9, gt=0, le=100, description="Percentile of a token's input magnitudes that all T spikes together carry."
    )

    @model_validator(mode="after")
    def _bits_fit(self) -> Self:
        if self.code == "binary" and self.steps > MOST_BITS:
            raise ValueError(
                f"steps of a binary code are its bits, of which float32 carries {MOST_BITS}: set steps to that or less"
            )
        return self

    def product(self, x: Tensor, held: Tensor | tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, Counts]:
        from hone.ops.device.spiking import spiking_linear

        assert not isinstance(held, tuple), "the weight itself is held"
        y, spikes = spiking_linear(x, held, steps=self.steps, code=self.code, percentile=self.percentile)
        return y, {
            "macs": len(x) * held.numel(),
            "spikes": int(spikes),
            "additions": int(spikes) * held.shape[0],
            "neuron_steps": self.steps * x.numel(),
        }

    def noisy(self, weight: Tensor, generator: Generator) -> Tensor:
        return weight

    def rounded(self, x: Tensor) -> Tensor:
        """Inputs as their spikes carry them, with slope 1 where they are carried and 0 beyond (straight-through)."""
        from hone.ops.device.spiking import fire, spike_values, thresholds

        flat = x.detach().reshape(-1, x.shape[-1])
        most = thresholds(flat, self.percentile)
        spikes = fire(flat, most, self.steps, self.code)
        carried = (spikes * spike_values(most, self.steps, self.code)).sum(0).view_as(x)
        most = most.view(*x.shape[:-1], 1).to(x.dtype)
        inside = x.clamp(-most, most)
        return inside + (carried.to(x.dtype) - inside.detach())
