"""Groups of columns of similar size: columns are sorted before groups are formed, so that no small column shares a large one's scale.

Legend: N rows, K columns, H [K, K] mean of x x^T. The file says which group each column belongs to (`g_idx`, as GPTQ's desc_act).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.compress.quantizers.gptq import GPTQ
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.model.quantized.scheme import Scheme


class SortedGroups(GPTQ):
    """GPTQ with groups of columns that are alike in size, by `g_idx`. Frantar et al. 2022 (desc_act), arXiv:2210.17323.

    GPTQ's `act_order` solves columns of large inputs first in groups of neighbours; here the groups themselves are of sorted
    columns. A linear gathers the scales of its columns when it runs, which takes more time than groups of neighbours do.
    """

    may_have_no_groups: ClassVar[bool] = False
    any_bits: ClassVar[str] = "kind=gptq with layout=pack-quantized"

    by: Literal["weights", "inputs", "products"] = Field(
        "weights",
        description="Size of a column: weights: its norm; inputs: the root mean square of the input that it multiplies, as "
        "desc_act; products: both multiplied.",
    )
    compensate: bool = Field(
        True, description="Whether errors are compensated in later columns; false rounds to nearest."
    )
    layout: Literal["gptq", "gptq_v2"] = Field("gptq", description="Storage format: GPTQModel's two, which have g_idx.")

    @model_validator(mode="after")
    def _neighbours_stay(self) -> SortedGroups:
        if self.pattern != "none":
            raise ValueError(
                f"pattern {self.pattern} is of neighbours, and columns are sorted: prune before, by sparsegpt"
            )
        if self.sparsity and not self.compensate:
            raise ValueError("sparsity prunes in the sweep that compensates: leave compensate out")
        return self

    def scheme(self, columns: int) -> Scheme:
        return replace(super().scheme(columns), permuted=self.groups_of(columns) > 0)

    def check(self, name: str, rows: int, columns: int) -> None:
        if not self.group_size:
            raise SpecError(f"{self.kind}: group_size 0 leaves no groups to sort", fix="use kind=gptq, or a group_size")
        super().check(name, rows, columns)

    def sizes(self, weights: Tensor, hessian: Tensor) -> Tensor:
        """The size [K] of each column of weights [N, K]."""
        inputs = hessian.diagonal().clamp(min=0).sqrt()
        if self.by == "inputs":
            return inputs
        columns = weights.norm(dim=0)
        return columns if self.by == "weights" else columns * inputs

    def apply(self, matrix: Matrix) -> None:
        """Sorts the columns, solves the sorted matrix in groups of neighbours, and puts the codes back in their places."""
        import torch

        from hone.compress.matrix import Matrix as Sorted

        H, keep = matrix.statistics["hessian"], matrix.keep
        order = torch.argsort(self.sizes(matrix.weight, H), descending=True, stable=True)
        inner = Sorted(
            matrix.name,
            matrix.original[:, order].contiguous(),
            matrix.stored_dtype,
            {"hessian": H[order][:, order].contiguous()},
            matrix.modules,
            keep=None if keep is None else keep[:, order],
        )
        inner.current = matrix.current[:, order].contiguous()
        if self.compensate:
            super().apply(inner)
        else:
            IntegerQuantizer.apply(self, inner)
        assert inner.stored is not None
        codes = torch.empty_like(inner.stored.codes)
        codes[:, order] = inner.stored.codes
        columns = len(order)
        index = torch.empty(columns, dtype=torch.int32, device=order.device)
        index[order] = torch.arange(columns, dtype=torch.int32, device=order.device) // self.groups_of(columns)
        matrix.stored = replace(inner.stored, codes=codes, index=index)
        matrix.notes += inner.notes

    def work(self, rows: int, columns: int) -> Work:
        """As GPTQ, with copies of the matrix and of H in sorted order."""
        gptq = super().work(rows, columns)
        copies = 16.0 * (rows * columns + columns**2)
        on_gpu = gptq.on_gpu and replace(
            gptq.on_gpu, num_bytes=gptq.on_gpu.num_bytes + copies, temporaries=gptq.on_gpu.temporaries + 2
        )
        return replace(gptq, num_bytes=gptq.num_bytes + copies, temporaries=gptq.temporaries + 2, on_gpu=on_gpu)
