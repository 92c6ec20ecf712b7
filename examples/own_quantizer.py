"""A quantizer of your own in one file: 4-bit integers, rounded up or down at random so that the mean is the weight.

    python examples/own_quantizer.py MODEL --out=work/example/compress-stochastic
    PYTHONPATH=examples hone compress MODEL --steps='[{kind: own_quantizer:Stochastic, seed: 1}]' --out=...

The fields are its options, checked and documented; estimate, storage format and figures come from the base class. A package
offers it under a short name by an entry point: [project.entry-points."hone.techniques"], "quantizer.stochastic" = "module:Stochastic".
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pydantic import Field

import hone
from hone.compress.matrix import Matrix
from hone.compress.quantizers.integer import IntegerQuantizer


class Stochastic(IntegerQuantizer):
    """Rounds each weight up or down at random, to the nearer code more often. Gupta et al. 2015, arXiv:1502.02551."""

    group_size: int = Field(32, ge=0, description="Columns that share a scale; 0 for one scale per row.")
    seed: int = Field(0, ge=0, description="Seed of the roundings.")

    def apply(self, matrix: Matrix) -> None:
        """Sets what of `matrix` is stored. `matrix.weight` is [rows, columns]."""
        found = self.find_grid(matrix)
        steps, zeros = found.wide(matrix.weight.dtype)
        draw = torch.Generator(matrix.weight.device).manual_seed(self.seed)
        codes = matrix.weight.reshape(*found.scales.shape, -1) / steps + zeros
        shift = torch.rand(codes.shape, generator=draw, dtype=codes.dtype, device=codes.device) - 0.5
        rounded = (((codes + shift).round() - zeros) * steps).view_as(matrix.weight)
        matrix.stored = self.scheme(matrix.weight.shape[1]).quantize(rounded, *found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model")
    options.add_argument("--out", type=Path, default=Path("work/example/compress-stochastic"))
    options.add_argument("--calibration-text", help="a text file, to measure the error of each matrix's outputs")
    options.add_argument("--num-sequences", type=int, default=16, help="of the calibration, 512 tokens each")
    given = options.parse_args()
    step = {"kind": "own_quantizer:Stochastic", "bits": 4}
    made = hone.make(
        "compress",
        given.out,
        inputs={"model": given.model},
        steps=[step],
        calibration_text=given.calibration_text,
        num_sequences=given.num_sequences,
    )
    for name in ("model_bytes", "compression_ratio", "relative_output_error"):
        if name in made.figures:
            print(f"{name:22} {made.figures[name].value:.4g} {made.figures[name].unit}")


if __name__ == "__main__":
    main()
