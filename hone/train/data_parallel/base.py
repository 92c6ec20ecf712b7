"""The base of data-parallel techniques: which part of weights, gradients and optimizer state a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.cost.train.replicas import Divided
from hone.train.data_parallel.moves import Moves
from hone.train.precision import TORCH_NAMES

if TYPE_CHECKING:
    from hone.base.artifact import Draft
    from hone.train.data_parallel.sums import Sum
    from hone.train.loop import Trainer
    from hone.train.spikes.skip_step import SkipStep


class DataParallel(Technique):
    """Each rank computes the gradient of its part of the batch; their sum is the gradient of the step.

    Losses and weights are those of one process, up to the rounding of sums in another order. `sharded` names what a rank
    holds a part of instead of all: 'optimizer' (with float32 master weights), 'gradients', 'weights'.
    """

    sharded: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True
    """Whether losses and weights are those of one process; otherwise technique and number of ranks are part of the identity."""
    alone: ClassVar[bool] = False
    """Whether each rank takes steps of its own, on its gradient alone."""
    precisions: ClassVar[frozenset[str]] = frozenset(TORCH_NAMES)

    @property
    def meets_every(self) -> int:
        """Steps after which all ranks have the same weights."""
        return 1

    def check(self, precision: str, intervals: Mapping[str, int], *, spikes: SkipStep | None = None) -> None:
        """Raises ValueError where the technique does not work in `precision`, the ranks' weights differ after one of `intervals`,
        or `spikes` asks for a step that all ranks leave out whole."""
        if spikes is not None and not self.exact:
            raise ValueError(
                f"{spikes.field} does not work with data_parallel {self.kind}: its ranks have each their own loss, or keep a part "
                "of a gradient for a later step"
            )
        if precision not in self.precisions:
            raise ValueError(
                f"data_parallel {self.kind} works in {', '.join(sorted(self.precisions))}, not in {precision}"
            )
        for name, steps in intervals.items():
            if steps % self.meets_every:
                raise ValueError(
                    f"{name}.interval {steps} is no multiple of the {self.meets_every} steps after which the ranks of "
                    f"data_parallel {self.kind} have the same weights"
                )

    def check_kept(self, at: int, steps: int) -> None:
        """Raises SpecError where the ranks' weights differ after step `at` of `steps`, whose state is to be kept."""
        if at % self.meets_every and at != steps:
            raise SpecError(
                f"checkpoint.keep.optimizer keeps the state after step {at}, and the ranks of data_parallel {self.kind} have the "
                f"same weights after every {self.meets_every} steps",
                fix=f"set schedule.decay so that it begins after a multiple of {self.meets_every} steps, or change sync_every",
            )

    def record(self, draft: Draft, trainer: Trainer) -> None:
        """Records what this technique alone has to say of a training that is done; rank 0 calls it."""

    def summing(self) -> Sum | None:
        """How the copies add up a gradient; None: by the backend."""
        return None

    def moves(self, num_shards: int) -> Moves:
        """How weights and gradients travel in a group of `num_shards` ranks. Raises SpecError where they cannot."""
        return Moves(num_shards)

    def trainer(self) -> type[Trainer]:
        """The class of the loop's steps."""
        from hone.train.loop import Trainer

        return Trainer

    def replicas(self, num_ranks: int) -> int:
        """Number of groups of ranks of which each holds all of the state together."""
        return num_ranks

    def divided(self, num_ranks: int) -> Divided:
        """The division of a training over `num_ranks` ranks, for estimates. Raises SpecError when they cannot be divided."""
        replicas = self.replicas(num_ranks)
        if num_ranks % replicas:
            raise SpecError(
                f"data_parallel_replicate_degree {replicas} does not divide {num_ranks} ranks",
                fix="start a multiple of it, or lower parallelism.data_parallel.data_parallel_replicate_degree",
            )
        return Divided(num_ranks, num_ranks // replicas, self.sharded)


class Sharded(DataParallel):
    """Data parallelism in which the ranks hold parts of the state."""

    data_parallel_replicate_degree: int = Field(
        1,
        ge=1,
        description="Groups of ranks that each hold all state together (HSDP): sums inside a group move the whole "
        "gradient, between groups only a rank's part.",
    )

    def replicas(self, num_ranks: int) -> int:
        """As asked for."""
        return self.data_parallel_replicate_degree


class Lossy(DataParallel):
    """Data parallelism whose result is not that of one process, and depends on the number of ranks."""

    exact: ClassVar[bool] = False
    precisions: ClassVar[frozenset[str]] = frozenset({"fp32", "bf16"})

    num_workers: int = Field(
        2, ge=2, description="Number of ranks: the result depends on it, so as many must be started."
    )

    def divided(self, num_ranks: int) -> Divided:
        """As `DataParallel.divided`. Raises SpecError when another number of ranks is started."""
        if num_ranks != self.num_workers:
            raise SpecError(
                f"data_parallel {self.kind} is set to {self.num_workers} ranks, and {num_ranks} started: its result depends on them",
                fix=f"start {self.num_workers} ranks, or "
                + (f"set parallelism.data_parallel.num_workers to {num_ranks}" if num_ranks > 1 else "take ddp"),
            )
        return super().divided(num_ranks)
