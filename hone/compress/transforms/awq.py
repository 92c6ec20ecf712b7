"""AWQ: input channels that matter are scaled up before rounding, so that their weights lose less.

Legend: N rows, K columns of a reader, C channels of the source, H [K, K] mean of x x^T.

The published search runs the block again for every candidate; tr(D H D^T), with D the change of the weights, is the same
error of a linear's outputs and needs no inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.transforms.base import Transform
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.layer import LayerWeights, Producer
    from hone.compress.quantizers.base import Quantizer

ROWS = 2048
"""Rows of a matrix, evenly spaced, whose error is computed for each candidate."""


class AWQ(Transform):
    """Scales input channels by mean|x|^alpha / mean|W|^beta, the best of a grid for the quantizer that follows. Lin et al. 2023, arXiv:2306.00978."""

    paper: ClassVar[str] = "arXiv:2306.00978"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "absmean", "hessian"})
    needs_quantizer: ClassVar[str] = "is fitted to a quantizer"

    grid_size: int = Field(20, ge=2, le=100, description="Values of alpha tried, from 0 to below 1.")
    duo_scaling: bool = Field(True, description="Also try beta = 1 - alpha; otherwise beta is 0.")

    def change(self, layer: LayerWeights) -> None:
        for source in layer.sources():
            readers = [path for path in source.readers if path in layer.targets]
            if readers:
                layer.scale(source, self._best(layer, source, readers))

    def work(self, rows: int, columns: int) -> Work:
        """A product with H and the rounding of some rows for each candidate."""
        some, tries = min(rows, ROWS), self.grid_size * (1 + self.duo_scaling)
        return Work(
            flops=2.0 * tries * some * columns**2,
            num_bytes=tries * 48.0 * some * columns + 60.0 * rows * columns,
            num_ops=tries * 20,
        )

    def _best(self, layer: LayerWeights, source: Producer, readers: list[str]) -> Tensor:
        """The candidate [C] with the least squared error of all readers' outputs; ones if none is better than no scale."""
        import torch

        inputs = layer.per_channel(source, layer.inputs(readers, "absmean", torch.add))
        weights = {path: _some(layer.weight(path)) for path in readers}
        group_sizes = {path: layer.storing[path].scheme(one.shape[1]).group_size for path, one in weights.items()}
        columns = torch.cat([_relative(weight, group_sizes[path]) for path, weight in weights.items()]).mean(0)
        sizes = layer.per_channel(source, columns).to(inputs)
        powers = []
        for index in range(self.grid_size):
            alpha = index / self.grid_size
            powers += [(alpha, beta) for beta in ((0.0, 1 - alpha) if self.duo_scaling else (0.0,))]

        def scales_of(alpha: float, beta: float) -> Tensor:
            scales = inputs.clamp(min=1e-4) ** alpha / sizes.clamp(min=1e-4) ** beta
            return (scales / (scales.max() * scales.min()).sqrt()).clamp(min=1e-4)

        mesh, errors = layer.mesh, torch.zeros(len(powers), dtype=torch.float64, device=inputs.device)
        for place in range(mesh.rank, len(powers), mesh.world_size):  # the ranks share the candidates
            wide = layer.per_feature(source, scales_of(*powers[place]))
            for path, weight in weights.items():
                errors[place] += _error(weight, wide, layer.statistics[path]["hessian"], layer.storing[path])
        return scales_of(*powers[int(mesh.sum(errors).nan_to_num(nan=torch.inf).argmin())])


def _some(weight: Tensor) -> Tensor:
    """At most `ROWS` rows, evenly spaced."""
    step = -(-len(weight) // ROWS)
    return weight[::step]


def _relative(weight: Tensor, group_size: int) -> Tensor:
    """|w| as a fraction of the largest of its group, [N, K]."""
    groups = weight.abs().view(len(weight), -1, group_size or weight.shape[1])
    return (groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)).view(weight.shape)


def _error(weight: Tensor, scales: Tensor, hessian: Tensor, quantizer: Quantizer) -> Tensor:
    """Squared error of the outputs when `weight` is rounded with its columns multiplied by `scales`."""
    scaled = weight * scales
    change = quantizer.nearest(scaled) / scales - weight
    if change.is_cuda:  # the sums stay in float32; their terms need only be good enough to choose by
        return ((change.bfloat16() @ hessian.bfloat16()).float() * change).sum()
    return ((change @ hessian.to(change)) * change).sum()
