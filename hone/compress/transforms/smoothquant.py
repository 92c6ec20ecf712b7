"""SmoothQuant: a scale per channel moves outliers from a linear's inputs to its weights, where rounding can take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.compress.transforms.base import Transform

if TYPE_CHECKING:
    from hone.compress.layer import LayerWeights


LEAST = 1e-5
"""Largest input or weight of a channel that is told from zero."""


class SmoothQuant(Transform):
    """Scales input channels by max|x|^alpha / max|W|^(1 - alpha), for rounded activations. Xiao et al. 2022, arXiv:2211.10438."""

    paper: ClassVar[str] = "arXiv:2211.10438"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "absmax"})

    alpha: float = Field(
        0.5, ge=0, le=1, description="Share of the inputs' range that moves to the weights; 0.8 for strong outliers."
    )
    inputs: Literal["norms", "all"] = Field(
        "norms", description="norms: inputs of linears after a norm, as in the paper; all: those of out and down too."
    )

    def change(self, layer: LayerWeights) -> None:
        import torch

        for source in layer.sources():
            readers = [path for path in source.readers if path in layer.targets]
            if not readers or (source.norm is None and self.inputs == "norms"):
                continue
            inputs = layer.per_channel(source, layer.inputs(readers, "absmax", torch.maximum))
            weights = layer.largest_read(source).to(inputs)
            scales = inputs.clamp(min=LEAST) ** self.alpha / weights.clamp(min=LEAST) ** (1 - self.alpha)
            layer.scale(source, torch.where(inputs > 0, scales, torch.ones_like(scales)))
