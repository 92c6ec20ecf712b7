"""Base of the low-rank steps: factors in place of a weight, or a correction beside what other steps made of it.

Shapes: N rows of a checkpoint module, K input features, r rank; A [r, K], B [N, r].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.compress.step import Entries, Step, Targets
from hone.compress.targets import HEAD
from hone.cost.work import Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hone.base.artifact import Draft
    from hone.compress.matrix import Matrix, Parts
    from hone.compress.targets import Linear
    from hone.model.config import ModelConfig

EIGH, GPU_EIGH = 30.0, 800.0
"""Operations of an eigendecomposition in float64 divided by n^3, at the rate of float32 products: one of two Xeon cores
(n 1024 and 2048: 21 to 32); and on a GPU, a guess that was not measured."""

PASS_OPS, GPU_PASS_OPS = 12, 200
"""Tensor operations started by one pass of the subspace iteration; on a GPU most are the kernels of its QR, a guess."""


class LowRank(Step):
    """A step that finds factors of rank `rank_of` for each checkpoint module, weighted by H if it needs the Hessian."""

    def rank_of(self, rows: int, columns: int) -> int:
        """The rank for a module of this shape."""
        raise NotImplementedError

    def check_module(self, name: str, rows: int, columns: int) -> None:
        """Raises SpecError when the factors of checkpoint module `name` would not be smaller than its weight, or nothing."""
        rank = self.rank_of(rows, columns)
        most = (rows * columns - 1) // (rows + columns)
        if not 0 < rank <= most:
            raise SpecError(
                f"{self.kind}: factors of rank {rank} of {name}, {rows} x {columns}, "
                + ("keep nothing" if rank < 1 else "are not smaller than its weight"),
                fix=f"use a rank from 1 to {most}, or leave it unchanged: ignore=['lm_head', '{name.rpartition('.')[2]}']",
            )

    def check_place(self, before: Sequence[Step], after: Sequence[Step]) -> None:
        before, after = ([one for one in part if one.targeted] for part in (before, after))
        if any(one.multiplies_inputs for one in before):
            raise ValueError(f"{self.kind} reads the inputs that the model computes, before rotation r4: use r4: false")
        if after:
            raise ValueError(f"{self.kind} comes before {after[0].kind}: it is the last step")
        self.check_lossy([one for one in before if one.prunes or one.stores])

    def check_lossy(self, before: Sequence[Step]) -> None:
        """Raises ValueError where it cannot work on what the steps `before` left of a weight: zeros and rounded values."""
        raise NotImplementedError

    def check_linear(self, name: str, linear: Linear) -> None:
        super().check_linear(name, linear)
        if linear.path == HEAD:
            raise SpecError(
                f"{self.kind} makes factors for the linears of layers, not for {HEAD}",
                fix="leave it unchanged: ignore=['lm_head']",
            )
        for module, rows in linear.modules:
            self.check_module(module, rows, linear.columns)

    @property
    def calibrated(self) -> bool:
        """Whether errors are weighted by the calibration inputs."""
        return "hessian" in self.needs

    def factorize(self, matrix: Matrix, wanted: Tensor, dtype: Any) -> list[tuple[Tensor, Tensor]]:
        """(A, B) in `dtype` of each module of `wanted` [N of all modules, K]."""
        from hone.solvers import factors

        hessian = matrix.statistics["hessian"] if self.calibrated else None
        parts = wanted.split(list(matrix.modules)) if matrix.modules else (wanted,)
        found = []
        for part in parts:
            down, up = factors.best(part, hessian, self.rank_of(*part.shape))
            found.append((down.to(dtype).contiguous(), up.to(dtype).contiguous()))
        return found

    def work(self, rows: int, columns: int) -> Work:
        """An eigendecomposition or a subspace iteration, of all modules as if they were one."""
        from hone.solvers import factors

        rank = min(self.rank_of(rows, columns), min(rows, columns))
        passes = 1 if factors.is_exact(rows, columns, rank) else factors.ITERATIONS
        cpu, gpu = (
            Work(
                flops=factors.flops(rows, columns, rank, eigh, calibrated=self.calibrated),
                num_bytes=80.0 * rows * columns,
                num_ops=40.0 + ops * passes,
                temporaries=12,
                squares=4.0 if self.calibrated else 0.0,
            )
            for eigh, ops in ((EIGH, PASS_OPS), (GPU_EIGH, GPU_PASS_OPS))
        )
        return replace(cpu, on_gpu=gpu)


class Factorization(LowRank):
    """A step that stores two factors in place of a weight: such folders load in hone alone."""

    stores: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset({"weights:low_rank"})
    takes: ClassVar[frozenset[str]] = frozenset({"weights:float"})

    ratio: float | None = Field(
        None, gt=0, lt=1, description="Fraction of each module's parameters that its factors keep; 0.8 without rank."
    )
    rank: int | None = Field(None, gt=0, description="Rank of every module, in place of ratio.")

    @model_validator(mode="after")
    def _one(self) -> Factorization:
        if self.ratio is not None and self.rank is not None:
            raise ValueError("give ratio or rank: both fix the rank of the factors")
        return self

    @property
    def note(self) -> str:
        return "weights are stored as factors, which only hone reads (hone.load), not transformers or vLLM"

    def rank_of(self, rows: int, columns: int) -> int:
        """`rank`, or the largest that keeps at most `ratio` of the parameters, from 16 on a multiple of 8."""
        if self.rank is not None:
            return self.rank
        rank = math.floor((0.8 if self.ratio is None else self.ratio) * rows * columns / (rows + columns))
        return rank // 8 * 8 if rank >= 16 else rank

    def apply(self, matrix: Matrix) -> None:
        matrix.factors = self.factorize(matrix, matrix.current, matrix.stored_dtype)
        matrix.replaced = True

    def check_lossy(self, before: Sequence[Step]) -> None:
        if before:
            raise ValueError(
                f"{self.kind} stores factors of the weight and loses what {before[0].kind} did to it: use one of them"
            )

    def entries(self, rows: int, columns: int, dtype: Any) -> Entries:
        rank = self.rank_of(rows, columns)
        return {"factor_a": (dtype, (rank, columns)), "factor_b": (dtype, (rows, rank))}

    def method(self, columns: int) -> str:
        return "low_rank"

    def tensors_of(self, matrix: Matrix, number: int, rows: slice) -> dict[str, Tensor]:
        return dict(zip(("factor_a", "factor_b"), matrix.factors[number], strict=True))

    def module(self, dense: nn.Module, parts: Parts) -> nn.Module:
        """A linear of the factors of all modules."""
        from hone.compress.low_rank import adapter

        return adapter.factored(dense, parts)

    def quantization(self, unchanged: Sequence[str]) -> dict[str, Any]:
        from hone.model.quantized import low_rank

        return low_rank.config(list(unchanged))


class Correction(LowRank):
    """A step after the others that adds factors to what they made of a weight: an adapter that PEFT and vLLM load."""

    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset({"weights:corrected"})
    takes: ClassVar[frozenset[str]] = frozenset({"weights:float"})

    rank: int = Field(
        32, gt=0, description="Rank of the factors of every module (the adapter's r; its lora_alpha is equal)."
    )
    iterations: int = Field(
        1,
        gt=0,
        le=20,
        description="Times that the weight less the factors is quantized and the rest factorized; the best one stays.",
    )

    @property
    def note(self) -> str:
        return (
            "the adapter in the subfolder 'adapter' is part of the model: hone applies it, PEFT and vLLM (--enable-lora) load "
            "it over the folder, and without it the model is the one before the correction"
        )

    def check_linear(self, name: str, linear: Linear) -> None:
        super().check_linear(name, linear)
        if linear.expert is not None:
            raise SpecError(
                f"{self.kind} writes an adapter, which cannot wrap {name}, the matrix of one expert",
                fix=r"leave experts unchanged: ignore=['lm_head', '\.experts\.']",
            )

    def rank_of(self, rows: int, columns: int) -> int:
        return self.rank

    @staticmethod
    def stored_dtype(checkpoint_dtype: Any) -> Any:
        """The dtype of the factors: the checkpoint's, or float16 for one of float32."""
        import torch

        return torch.float16 if checkpoint_dtype in (torch.float32, torch.float64) else checkpoint_dtype

    def apply(self, matrix: Matrix) -> None:
        chosen: tuple[float, Any, Any, Any] | None = None
        for turn in range(self.iterations):
            if turn:
                assert matrix.quantize is not None
                added = matrix.product()
                matrix.factors, matrix.stored, matrix.current = [], None, matrix.original - added
                matrix.quantize(matrix)
            error = matrix.original - matrix.base
            matrix.factors = self.factorize(matrix, error, self.stored_dtype(matrix.stored_dtype))
            left = error - matrix.product()
            seen = left @ matrix.statistics["hessian"] if self.calibrated else left
            lost = float((seen * left).sum())
            if chosen is None or lost < chosen[0]:
                chosen = (lost, matrix.factors, matrix.stored, matrix.current)
        assert chosen is not None
        _, matrix.factors, matrix.stored, matrix.current = chosen

    def work(self, rows: int, columns: int) -> Work:
        """As often as it iterates; what the quantizer takes to run again is taken for that of a sweep of GPTQ."""
        once, again = super().work(rows, columns), (self.iterations - 1) * (rows * columns**2 + columns**3 / 3)
        assert once.on_gpu is not None
        cpu, gpu = (
            replace(
                one,
                flops=self.iterations * one.flops + again,
                num_bytes=self.iterations * (400.0 if again else 120.0) * rows * columns,
                num_ops=self.iterations * one.num_ops + (self.iterations - 1) * 17.0 * columns,
            )
            for one in (once, once.on_gpu)
        )
        return replace(cpu, on_gpu=gpu)

    def check_lossy(self, before: Sequence[Step]) -> None:
        if not before:
            raise ValueError(f"{self.kind} corrects the error of a quantizer or pruner: put one before it")
        if self.iterations > 1 and not any("weights:quantized" in one.gives for one in before):
            raise ValueError(
                f"{self.kind} with iterations {self.iterations} quantizes again: put a quantizer before it"
            )

    def module(self, dense: nn.Module, parts: Parts) -> nn.Module:
        """`dense` with the factors around it, as in a model that is loaded."""
        from hone.compress.low_rank import adapter

        return adapter.corrected(dense, parts)

    def beside(self, matrix: Matrix, names: Sequence[str]) -> dict[str, Tensor]:
        from hone.compress.low_rank import adapter

        return adapter.tensors(names, matrix.factors)

    def planned(self, config: ModelConfig, targets: Targets, dtype: torch.dtype) -> tuple[ModelConfig, int]:
        from hone.compress.low_rank import adapter
        from hone.model.adapters.peft import adapted

        size = adapter.file_bytes(self.rank, targets, self.stored_dtype(dtype))
        return adapted(config, adapter.spec(self.rank, config, targets)), size

    def conclude(self, draft: Draft, config: ModelConfig, targets: Targets) -> None:
        """Writes the adapter's folder, of all linears in `targets`."""
        from hone.compress.low_rank import adapter

        adapter.write_folder(draft, len(targets), adapter.spec(self.rank, config, targets))

    def config_values(self) -> dict[str, Any]:
        from hone.compress.low_rank import adapter

        return adapter.CONFIG
