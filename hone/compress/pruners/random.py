"""Random pruning: the control for other pruners, and for lottery tickets."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.pruners.base import Pruner
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix


class RandomPruning(Pruner):
    """Zeroes the given fraction of each matrix's weights, drawn at random: the control of Frankle and Carbin 2018, arXiv:1803.03635."""

    paper: ClassVar[str] = "arXiv:1803.03635"

    seed: int = Field(0, ge=0, description="Seed of the draw; every matrix has its own, which depends on its name too.")

    def apply(self, matrix: Matrix) -> None:
        import torch

        digest = hashlib.sha256(f"{self.seed}/{matrix.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        scores = torch.rand(matrix.original.shape, generator=generator, dtype=torch.float64)
        matrix.prune(self.largest_of(scores, "matrix").to(matrix.original.device))

    def work(self, rows: int, columns: int) -> Work:
        """Drawing and sorting on the CPU."""
        return Work(num_bytes=1000.0 * rows * columns, num_ops=20, temporaries=12)
