"""A decoder whose layers' linears are computed by a simulated device."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from hone.model.decoder import Decoder
from hone.model.devices.base import SimulatedDevice, held_linears
from hone.model.linear import Dense


class OnDevice(nn.Module):
    """A linear that `device` computes: what it holds is drawn when this is made, and the noise of its products at each pass."""

    def __init__(self, inner: Dense, device: SimulatedDevice, index: int, counts: Counter[str]) -> None:
        super().__init__()
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.bias, self.device_of, self.counts = inner.bias, device, counts
        weight = inner.weight.detach()
        self.generator = torch.Generator(weight.device).manual_seed(device.seed * 1_000_003 + index)
        self.held = device.hold(weight, self.generator)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        y, counted = self.device_of.product(x.reshape(-1, self.in_features), self.held, self.generator)
        self.counts.update(counted)
        y = y.view(*x.shape[:-1], self.out_features)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def simulate(model: Decoder, device: SimulatedDevice) -> Counter[str]:
    """Replaces the layers' linears of `model` by `device`'s, and returns the counter of what they will have done.

    For passes without gradients; the weights that a device holds are a copy.
    """
    counts: Counter[str] = Counter()
    number = 0
    for index, layer in enumerate(model.layers):
        for path, linear in held_linears(layer, model.config.linears(index)).items():
            layer.set_submodule(path, OnDevice(linear, device, number, counts))
            number += 1
    return counts


class NoisyDense(Dense):
    """A `Dense` that computes with a device's noise wherever gradients are wanted, and is the plain layer elsewhere and on disk."""

    device_of: SimulatedDevice
    seed: int

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        # Drawn anew from the same seed at each pass, so that layers that are run again for their gradients compute the same.
        generator = torch.Generator(self.weight.device).manual_seed(self.seed)
        weight = self.device_of.noisy(self.weight, generator)
        return nn.functional.linear(self.device_of.rounded(x), weight, self.bias)


class NoisyLinears:
    """Makes the linears of `model` compute with the noise of `device` in training; each step has other noise, of the step's number."""

    def __init__(self, model: Decoder, device: SimulatedDevice) -> None:
        self.device, self.linears = device, []
        for index, layer in enumerate(model.layers):
            for linear in held_linears(layer, model.config.linears(index)).values():
                linear.__class__ = NoisyDense  # as `Fp8Linears` does: names and weights stay
                linear.device_of, linear.seed = device, 0
                self.linears.append(linear)

    def begin(self, weights: object, step: int) -> None:
        """To be called before the first pass of step `step`."""
        for index, linear in enumerate(self.linears):
            linear.seed = (self.device.seed * 1_000_003 + step) * len(self.linears) + index
