"""Cross-layer equalization: a scale per channel gives a linear's rows and the columns that read them the same range."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.compress.transforms.base import Transform

if TYPE_CHECKING:
    from hone.compress.layer import LayerWeights


class CrossLayerEqualization(Transform):
    """Scales the rows of up and v, and the columns that read them, to equal ranges. Nagel et al. 2019, arXiv:1906.04721."""

    paper: ClassVar[str] = "arXiv:1906.04721"

    def change(self, layer: LayerWeights) -> None:
        import torch

        for source in layer.sources():
            if source.linear is None or not layer.targets.issuperset((source.linear, *source.readers)):
                continue
            made, read = layer.rows(source).abs().amax(1), layer.largest_read(source)
            scales = (made / read).sqrt()
            layer.scale(source, torch.where((made > 0) & (read > 0), scales, torch.ones_like(scales)))
