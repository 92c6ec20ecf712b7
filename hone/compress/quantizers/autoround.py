"""AutoRound: learns by signed gradient descent whether each weight is rounded up or down, and the scales.

The turns of the descent are in `hone.solvers.descent`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix

TURN_BYTES = 200.0
"""Bytes a weight in one turn without the product, at the rate of a large copy: 10 ns on two Intel Xeon cores."""


class AutoRound(IntegerQuantizer):
    """Learns roundings and scales by signed gradient descent on the output error. Cheng et al. 2023, arXiv:2309.05516."""

    paper: ClassVar[str] = "arXiv:2309.05516"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    iters: int = Field(200, ge=1, description="Turns of gradient descent.")
    lr: float = Field(0.0, ge=0, description="Step of the first turn, which falls linearly to 0; 0 for 1 / iters.")
    learn_scales: bool = Field(True, description="Scales are learned as well, between half and one and a half times.")

    def apply(self, matrix: Matrix) -> None:
        from hone.model.quantized.scheme import Stored
        from hone.solvers.descent import Descent

        hessian, start = matrix.statistics["hessian"], self.find_grid(matrix)
        descent = Descent(matrix.current, hessian, start, self.bits, matrix.keep)
        first = self.lr or 1.0 / self.iters
        for turn in range(self.iters):
            descent.turn(first * (1 - turn / self.iters), learn_scales=self.learn_scales)
        codes, found = descent.best()
        matrix.stored = Stored(self.scheme(codes.shape[1]), codes, *found)

    def work(self, rows: int, columns: int) -> Work:
        """The start, and for each turn a product with H and some thirty passes."""
        start, turns, size = super().work(rows, columns), self.iters + 1, rows * columns
        on_cpu, on_gpu = (
            Work(
                flops=2.0 * turns * size * columns,
                num_bytes=one.num_bytes + TURN_BYTES * turns * size,
                num_ops=one.num_ops + 40.0 * turns,
                temporaries=14,
            )
            for one in (start, start.on_gpu or start)
        )
        return replace(on_cpu, on_gpu=on_gpu)
