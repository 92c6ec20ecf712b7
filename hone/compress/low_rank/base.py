"""Base of the low-rank steps: factors in place of a weight, or a correction beside what other steps made of it.

Shapes: N rows of a checkpoint module, K input features, r rank; A [r, K], B [N, r].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.compress.matrix import Matrix, Step, Storage, quantizer_of
from hone.compress.pruners.base import Sparse
from hone.compress.targets import HEAD
from hone.compress.transforms.rotation import Rotation
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.targets import Linear

torch = lazy("torch")
factors = lazy("hone.solvers.factors")

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

    @property
    def calibrated(self) -> bool:
        """Whether errors are weighted by the calibration inputs."""
        return "hessian" in self.needs

    def factorize(self, matrix: Matrix, wanted: Tensor, dtype: Any) -> list[tuple[Tensor, Tensor]]:
        """(A, B) in `dtype` of each module of `wanted` [N of all modules, K]."""
        hessian = matrix.statistics["hessian"] if self.calibrated else None
        parts = wanted.split(list(matrix.modules)) if matrix.modules else (wanted,)
        found = []
        for part in parts:
            down, up = factors.best(part, hessian, self.rank_of(*part.shape))
            found.append((down.to(dtype).contiguous(), up.to(dtype).contiguous()))
        return found

    def work(self, rows: int, columns: int) -> Work:
        """An eigendecomposition or a subspace iteration, of all modules as if they were one."""
        rank = min(self.rank_of(rows, columns), min(rows, columns))
        passes = 1 if factors.is_exact(rows, columns, rank) else factors.ITERATIONS
        cpu, gpu = (
            Work(
                flops=factors.flops(rows, columns, rank, eigh, calibrated=self.calibrated),
                num_bytes=80.0 * rows * columns,
                num_ops=40.0 + ops * passes,
                temporaries=12,
            )
            for eigh, ops in ((EIGH, PASS_OPS), (GPU_EIGH, GPU_PASS_OPS))
        )
        return replace(cpu, on_gpu=gpu)


class Factorization(LowRank, Storage):
    """A step that stores two factors in place of a weight: such folders load in hone alone."""

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

    def entries(self, rows: int, columns: int, dtype: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
        rank = self.rank_of(rows, columns)
        return {"factor_a": (dtype, (rank, columns)), "factor_b": (dtype, (rows, rank))}

    def method(self, columns: int) -> str:
        return "low_rank"


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

    def rank_of(self, rows: int, columns: int) -> int:
        return self.rank

    @staticmethod
    def stored_dtype(checkpoint_dtype: Any) -> Any:
        """The dtype of the factors: the checkpoint's, or float16 for one of float32."""
        return torch.float16 if checkpoint_dtype in (torch.float32, torch.float64) else checkpoint_dtype

    def apply(self, matrix: Matrix) -> None:
        chosen: tuple[float, Any, Any, Any] | None = None
        for turn in range(self.iterations):
            if turn:
                assert matrix.quantizer is not None
                added = matrix.product()
                matrix.factors, matrix.stored, matrix.current = [], None, matrix.original - added
                matrix.quantizer.apply(matrix)
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


def correction_of(steps: Iterable[Any]) -> Correction | None:
    """The step that adds an adapter; None without one."""
    return next((step for step in steps if isinstance(step, Correction)), None)


def check_modules(steps: Iterable[Step], linear: Linear) -> None:
    """Raises SpecError when a low-rank step cannot work on a checkpoint module of `linear`."""
    for step in steps:
        if isinstance(step, LowRank):
            if linear.path == HEAD:
                raise SpecError(
                    f"{step.kind} makes factors for the linears of layers, not for {HEAD}",
                    fix="leave it unchanged: ignore=['lm_head']",
                )
            for name, rows in linear.modules:
                step.check_module(name, rows, linear.columns)


def low_rank_last(steps: Iterable[Step]) -> None:
    """Raises ValueError when a low-rank step is not the last one, or has nothing to do there."""
    steps = tuple(steps)
    for place, step in enumerate(steps):
        if not isinstance(step, LowRank):
            continue
        before = steps[:place]
        if any(isinstance(one, Rotation) and one.r4 for one in before):
            raise ValueError(f"{step.kind} reads the inputs that the model computes, before rotation r4: use r4: false")
        if place + 1 < len(steps):
            raise ValueError(f"{step.kind} comes before {steps[place + 1].kind}: it is the last step")
        lossy = [one.kind for one in before if isinstance(one, Sparse | Storage)]
        if isinstance(step, Factorization) and lossy:
            raise ValueError(
                f"{step.kind} stores factors of the weight and loses what {lossy[0]} did to it: use one of them"
            )
        if isinstance(step, Correction) and not lossy:
            raise ValueError(f"{step.kind} corrects the error of a quantizer or pruner: put one before it")
        if isinstance(step, Correction) and step.iterations > 1 and quantizer_of(before) is None:
            raise ValueError(
                f"{step.kind} with iterations {step.iterations} quantizes again: put a quantizer before it"
            )
