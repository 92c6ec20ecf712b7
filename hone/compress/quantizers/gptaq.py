"""GPTAQ: GPTQ that also makes up for what the layers before have changed in a layer's inputs.

GPTQ keeps W' X near W X, with X the inputs in the compressed model; here W' X is to be near W D, with D the same inputs in the
model that is not compressed. `hone.solvers.sweep.towards` turns the paper's updates into weights and a factor for GPTQ's sweep.
The figure relative_output_error is of (W' - W) X, as for every quantizer, and so larger than GPTQ's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.gptq import GPTQ
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.compress.targets import Linear


SQUARES = 10.0
"""Float32 tensors [K, K] that exist at once in `hone.solvers.sweep.towards`, its arguments included."""


class GPTAQ(GPTQ):
    """GPTQ towards the outputs of the model that is not compressed, inputs included. Li et al. 2025, arXiv:2504.02692."""

    paper: ClassVar[str] = "arXiv:2504.02692"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian", "cross"})

    alpha: float = Field(
        0.25, ge=0, le=1, description="Share of the change of the inputs that is made up for: 1 in the paper; 0: GPTQ."
    )

    def check_linear(self, name: str, linear: Linear) -> None:
        super().check_linear(name, linear)
        if linear.expert is not None:
            raise SpecError(
                f"gptaq compares a token's inputs in two models, and each may send it to other experts than those of {name}",
                fix=r"use gptq, or leave experts unchanged: ignore=['lm_head', '\.experts\.']",
            )

    def aims(self, matrix: Matrix, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        from hone.solvers.sweep import towards

        cross = matrix.statistics["cross"].to(factor.dtype)[order][:, order]
        wanted, ratio = towards(matrix.current[:, order], factor, self.alpha * cross)
        if not bool(torch.isfinite(wanted).all()):
            matrix.notes.append("the change of the inputs is too large to be made up for: as GPTQ")
            return matrix.current, factor
        aims = torch.empty_like(wanted)
        aims[:, order] = wanted
        return aims, ratio

    def work(self, rows: int, columns: int) -> Work:
        """GPTQ's, two products and two triangular solves of [K, K] (slower than products), and one of [N, K]."""
        gptq = super().work(rows, columns)
        more = 8.0 * columns**3 + rows * columns**2
        assert gptq.on_gpu is not None
        on_gpu = replace(gptq.on_gpu, flops=gptq.on_gpu.flops + more, squares=SQUARES)
        return replace(gptq, flops=gptq.flops + more, squares=SQUARES, on_gpu=on_gpu)
