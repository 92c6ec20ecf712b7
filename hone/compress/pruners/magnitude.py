"""Magnitude pruning: the smallest weights of every matrix become zero."""

from __future__ import annotations

from typing import ClassVar

from hone.base.lazy import lazy
from hone.compress.matrix import Matrix
from hone.compress.pruners.base import Pruner
from hone.cost.compress import Work

torch = lazy("torch")


class Magnitude(Pruner):
    """Zeroes the given fraction of each matrix's weights, smallest magnitude first. Han et al. 2015, arXiv:1506.02626."""

    paper: ClassVar[str] = "arXiv:1506.02626"

    def apply(self, matrix: Matrix) -> None:
        if self.pattern != "none":
            matrix.prune(self.pattern_of(matrix.weight.abs()))
            return
        sizes = matrix.weight.abs().flatten()
        count = round(self.sparsity * sizes.numel())
        keep = torch.ones_like(sizes, dtype=torch.bool)
        if count:
            largest = sizes.kthvalue(count).values  # of the pruned ones
            keep = sizes > largest
            # Of equal magnitudes the first are pruned, so that the mask is equal on every run and machine.
            ties = (sizes == largest).nonzero().flatten()
            keep[ties[count - int((sizes < largest).sum()) :]] = True
        matrix.prune(keep.view(matrix.original.shape))

    def work(self, rows: int, columns: int) -> Work:
        """A selection and the mask, mostly the reading and writing of newly allocated memory."""
        return Work(num_bytes=440.0 * rows * columns, num_ops=30, temporaries=12)
