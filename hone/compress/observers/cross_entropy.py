"""The range whose clipping and rounding cost the model's loss least, by the loss's gradients."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.compress.observers.mse import MSE


class CrossEntropy(MSE):
    """The search of `mse`, each squared error weighted by the squared gradient of the next-token cross entropy: the diagonal of the Fisher matrix, as Kim et al. 2023, arXiv:2306.07629, weight errors of weights."""

    paper: ClassVar[str] = "arXiv:2306.07629"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes", "gradients"})
    histogram: ClassVar[str] = "gradients"

    gradient_sequences: int = Field(
        4,
        gt=0,
        description="Calibration sequences that the whole uncompressed model, held in memory, is differentiated on.",
    )
