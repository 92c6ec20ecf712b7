"""Phase-change memory that holds a weight as conductances: how they are written, drift and are read, and the product of a tile.

The model and its constants are those that Nandakumar et al. 2019 measured on a million devices (doi:10.1109/ICECS46596.2019.8964852)
and Rasch et al. 2023 (arXiv:2302.08469) use for inference. Conductances are relative to the largest, g in [0, 1] for 25 uS. A weight
is the difference of two devices, of which one is to be 0. Shapes: N outputs, K inputs, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.ops.device.converters import converted, scaled

LARGEST_US = 25.0
"""Microsiemens of g = 1, the unit in which the constants of writing were measured."""
WRITTEN_S = 20.0
"""Seconds after which a written conductance is first read, from which its drift counts."""
READ_S = 250e-9
"""Seconds of one read."""
_SMALLEST = 1e-9
"""Below this g is taken as this where its logarithm is needed."""


def writing_spread(g: Tensor) -> Tensor:
    """Standard deviation of the conductance that is found where `g` was to be written, both relative to the largest."""
    return (0.26348 + 1.9650 * g - 1.1731 * g.square()).clamp_min(0.0) / LARGEST_US


def written_noise(relative: Tensor, generator: torch.Generator) -> Tensor:
    """The error that writing leaves in a pair's difference, for a relative weight in [-1, 1]; a draw, without gradients."""
    plus, minus = writing_spread(relative.clamp_min(0.0)), writing_spread((-relative).clamp_min(0.0))
    spread = (plus.square() + minus.square()).sqrt()
    return spread * torch.randn(relative.shape, generator=generator, device=relative.device, dtype=relative.dtype)


def drift_exponent(g: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over devices of nu, in g(t) = g (t / 20 s)^-nu."""
    log = g.clamp_min(_SMALLEST).log()
    return (-0.0155 * log + 0.0244).clamp(0.049, 0.1), (-0.0125 * log - 0.0059).clamp(0.008, 0.045)


def reading_spread(g: Tensor, written: Tensor, after_s: float) -> Tensor:
    """Standard deviation of a conductance read `after_s` seconds after writing, by 1/f noise: `g` after its drift, `written` before."""
    quality = (0.0088 / written.clamp_min(_SMALLEST) ** 0.65).clamp_max(0.2)
    return g * quality * math.sqrt(math.log((after_s + READ_S) / (2 * READ_S)))


def conductances(target: Tensor, after_s: float, generator: torch.Generator) -> Tensor:
    """The conductances that hold `target` (g in [0, 1], any shape), `after_s` seconds after they were written; a draw of `generator`."""

    def normal() -> Tensor:
        return torch.randn(target.shape, generator=generator, device=target.device, dtype=target.dtype)

    written = (target + writing_spread(target) * normal()).clamp_min(0.0)
    mean, spread = drift_exponent(target)
    nu = (mean + spread * normal()).clamp_min(0.0)
    drifted = written * (max(after_s + WRITTEN_S, WRITTEN_S) / WRITTEN_S) ** -nu
    return (drifted + reading_spread(drifted, written, after_s + WRITTEN_S) * normal()).clamp_min(0.0)


def pairs(weight: Tensor, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """The two conductances of each weight [N, K], and the scale [N, 1] of each output: weight = scale (plus - minus).

    `clip` > 0: weights beyond that many root mean squares of their output are written as that; 0: the largest is g = 1.
    """
    scale = weight.abs().amax(-1, keepdim=True)
    if clip > 0:
        scale = torch.minimum(scale, clip * weight.square().mean(-1, keepdim=True).sqrt())
    scale = scale.masked_fill(scale == 0, 1.0)
    relative = (weight / scale).clamp(-1.0, 1.0)
    return relative.clamp_min(0.0), (-relative).clamp_min(0.0), scale


def programmed(
    weight: Tensor, *, after_s: float, clip: float, compensated: bool, generator: torch.Generator, tile: int
) -> tuple[Tensor, Tensor]:
    """The relative weight [N, K] that tiles of `tile` inputs hold, `after_s` seconds after writing, and the scale [N, 1] of its outputs.

    `compensated`: each tile's outputs are multiplied by what its mean magnitude has lost since it was first read (global drift
    compensation, Joshi et al. 2020, doi:10.1038/s41467-020-16108-9).
    """
    plus, minus, scale = pairs(weight.float(), clip)
    state = generator.get_state()
    held = conductances(plus, after_s, generator) - conductances(minus, after_s, generator)
    if compensated:
        generator.set_state(state)  # the same devices, when they were first read
        first = conductances(plus, 0.0, generator) - conductances(minus, 0.0, generator)
        for begin in range(0, weight.shape[-1], tile):
            part = slice(begin, begin + tile)
            lost = held[:, part].abs().mean()
            held[:, part] *= first[:, part].abs().mean() / lost.clamp_min(_SMALLEST)
    return held, scale


def analog_linear(
    x: Tensor,
    held: Tensor,
    scale: Tensor,
    *,
    tile: int,
    dac_bits: int,
    adc_bits: int,
    output_bound: float,
    output_noise: float,
    generator: torch.Generator | None,
) -> Tensor:
    """x [T, K] times what tiles hold (`programmed`), [T, N] float32.

    Every tile of `tile` inputs gets its part of a token scaled to the range of the DAC, adds noise of `output_noise` to its
    sums, and has them clipped to `output_bound` and rounded by the ADC, in units of largest input times largest weight; parts
    of the tiles are then added digitally. Without `generator` sums have no noise.
    """
    total = torch.zeros(*x.shape[:-1], held.shape[0], dtype=torch.float32, device=x.device)
    for begin in range(0, x.shape[-1], tile):
        part, size = scaled(x[..., begin : begin + tile].float())
        sums = converted(part, dac_bits) @ held[:, begin : begin + tile].T
        if generator is not None and output_noise:
            sums = sums + output_noise * torch.randn(sums.shape, generator=generator, device=sums.device)
        total += converted(sums, adc_bits, output_bound) * size
    return total * scale.squeeze(-1)
