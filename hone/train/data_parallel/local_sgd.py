"""Local SGD and DiLoCo: ranks train on their own for some steps, then their weights are combined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.cost.train.replicas import Divided
from hone.train.data_parallel.base import Lossy

if TYPE_CHECKING:
    from hone.train.data_parallel.local import LocalTrainer


class LocalSGD(Lossy):
    """Every rank takes `sync_every` steps on its part of each batch, with its own optimizer state; then weights are averaged. Stich 2018, arXiv:1805.09767."""

    paper: ClassVar[str] = "arXiv:1805.09767"
    alone: ClassVar[bool] = True

    sync_every: int = Field(8, ge=1, description="Steps between two combinations of the weights.")

    @property
    def meets_every(self) -> int:
        """The steps between two combinations."""
        return self.sync_every

    @property
    def outer(self) -> tuple[float, float]:
        """(learning rate, momentum) of the step from the last common weights to the mean."""
        return 1.0, 0.0

    def trainer(self) -> type[LocalTrainer]:  # type: ignore[override]
        """Steps of one rank, and combinations."""
        from hone.train.data_parallel.local import LocalTrainer, with_outer

        return with_outer(LocalTrainer, self.sync_every, *self.outer)

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`: each rank keeps the last common weights and the velocity of the outer step, in float32."""
        return replace(super().divided(num_ranks), every=self.sync_every, kept_bytes=8.0 if self.outer[1] else 4.0)


class DiLoCo(LocalSGD):
    """As local_sgd, but the mean change is the gradient of an outer SGD with Nesterov momentum. Douillard et al. 2023, arXiv:2311.08105."""

    paper: ClassVar[str] = "arXiv:2311.08105"

    sync_every: int = Field(50, ge=1, description="Steps between two outer steps; the paper takes 500.")
    outer_lr: float = Field(0.7, gt=0, description="Learning rate of the outer step.")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step.")

    @property
    def outer(self) -> tuple[float, float]:
        """As asked for."""
        return self.outer_lr, self.outer_momentum
