"""A product by light: codes of blocks of numbers, and the noise of counting photons. Anderson et al. 2023, arXiv:2302.10360."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.device.converters import converted, scaled


def optical_linear(
    x: Tensor,
    weight: Tensor,
    *,
    block: int,
    input_bits: int,
    weight_bits: int,
    output_bits: int,
    photons: float,
    thermal: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """x [T, K] times weight [N, K] in blocks of `block` inputs: [T, N] float32, blocks added digitally, and the photons detected.

    A block of a token, and that of an output's weights, has one scale (block floating point) and codes of so many bits; the sum of
    a block has a range of block / 4 largest products and `output_bits`. A full-scale product is `photons` photons at the detector: a sum of
    the magnitudes p of a block's products has a shot noise of sqrt(p / photons), and the detector adds `thermal`
    electrons of noise, thermal / photons. Without `generator` there is no noise. 0 photons: as many as wanted, no noise.
    """
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float32, device=x.device)
    detected = torch.zeros((), dtype=torch.float64, device=x.device)
    for begin in range(0, x.shape[-1], block):
        part, size = scaled(x[..., begin : begin + block].float())
        held, scale = scaled(weight[:, begin : begin + block].float())
        part, held = converted(part, input_bits), converted(held, weight_bits)
        sums = part @ held.T
        if generator is not None and photons > 0:
            light = part.abs() @ held.abs().T
            detected += photons * light.sum(dtype=torch.float64)
            spread = (light / photons + (thermal / photons) ** 2).sqrt()
            sums = sums + spread * torch.randn(sums.shape, generator=generator, device=sums.device)
        total += converted(sums, output_bits, max(part.shape[-1] / 4, 1.0)) * size * scale.squeeze(-1)
    return total, detected
