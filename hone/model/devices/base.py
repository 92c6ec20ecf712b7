"""What a simulated device is: how it computes a linear's product, what it counts, and the noise that a training gets used to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from hone.model.config import ModelConfig

Counts = dict[str, int]
"""Operations by name: 'macs', 'adc_conversions', 'spikes', ..."""


class SimulatedDevice(Technique):
    """A device that holds the weights of the layers' linears and multiplies by them; everything else is computed as ever.

    Embeddings, the head, norms, attention's products and routers stay digital. What is simulated is the numbers that come out;
    operations are counted, and neither time nor energy is said of hardware that does not exist.
    """

    trains: ClassVar[bool] = True
    """Whether a training can compute with its noise."""

    seed: int = Field(0, ge=0, description="Seed of the devices' noise.")

    def hold(self, weight: Tensor, generator: Generator) -> Tensor | tuple[Tensor, ...]:
        """What the device holds for a weight [N, K]; drawn once, before the first product."""
        return weight

    def product(self, x: Tensor, held: Tensor | tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, Counts]:
        """x [T, K] by what is held: [T, N] float32, and the operations that it took."""
        raise NotImplementedError

    def noisy(self, weight: Tensor, generator: Generator) -> Tensor:
        """The weight [N, K] that a training step computes with, differentiable in `weight`."""
        raise NotImplementedError

    def rounded(self, x: Tensor) -> Tensor:
        """The input [..., K] that a training step computes with, differentiable in `x`."""
        return x


def refuse(config: ModelConfig, quantized: bool, role: str) -> None:
    """Raises SpecError where a device cannot hold the linears of `config`: experts, adapters, and weights that are no longer floats."""
    if quantized:
        raise SpecError(
            f"simulated_device: the {role} is quantized, and devices are written from the weights themselves",
            fix="give the model that it was made from",
        )
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            if linear.experts is not None:
                raise SpecError(
                    f"simulated_device: layer {index} has {linear.experts} experts ({path}), which no device is simulated for",
                    fix="give a model without experts",
                )
            if config.wrappers(index, path, linear):
                raise SpecError(
                    f"simulated_device: layer {index} has an adapter on {path}",
                    fix="merge the adapter into the model first",
                )


def held_linears(layer: nn.Module, linears: dict[str, object]) -> dict[str, nn.Module]:
    """The linears of `layer` that a device holds, by path: those of `linears` that are dense and not precise, as routers are."""
    from hone.model.linear import Dense

    found = {path: layer.get_submodule(path) for path, one in linears.items() if not one.precise}  # type: ignore[attr-defined]
    return {path: module for path, module in found.items() if type(module) is Dense}
