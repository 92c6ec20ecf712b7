"""The base of pipeline schedules as techniques: the table that a schedule makes, and where it works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.base.table import Technique
from hone.cost.pipeline.table import Table

if TYPE_CHECKING:
    from hone.model.config import ModelConfig

_PLAIN = "hone.parallel.pipeline.schedules.one_forward_one_backward:one_forward_one_backward"

_MOST_PASSES = 8
"""Micro-batches a rank up to which others are tried."""


class PipelineSchedule(Technique):
    """The micro-batches of a step (`gradient_accumulation_steps`) pass the stages in the order of a table.

    Losses and weights are those of one process, to the bit where a stage adds its micro-batches in their order.
    """

    function: ClassVar[str]
    """'module:name' of the table's function of ranks, micro-batches and options."""
    exact: ClassVar[bool] = True
    """Whether losses and weights are those of one process; otherwise schedule and degree are part of a training's identity."""

    def check(self, *, precision: str, max_grad_norm: float, spikes: str) -> None:
        """Raises ValueError where the schedule does not work in `precision`, with clipping, or with `spikes`, a field ('': none)."""

    def check_model(self, config: ModelConfig) -> None:
        """Raises SpecError where it does not work for a model of `config`."""

    @property
    def copies(self) -> bool:
        """Whether an update is made before it is known to be right, so that it may have to be taken back from copies."""
        return False

    @property
    def steps(self) -> str:
        """'module:name' of the class of the loop's steps; '': that of data parallelism."""
        return ""

    def trainer(self) -> Callable[..., Any] | None:
        """The class of the loop's steps; None: that of data parallelism."""
        found: Callable[..., Any] | None = resolve(self.steps) if self.steps else None
        return found

    def options(self) -> dict[str, Any]:
        """What the function takes beside ranks and micro-batches."""
        return {}

    def table(self, num_ranks: int, microbatches: int, sequences: int | None = None) -> Table:
        """The passes of every rank. Raises SpecError where the schedule needs other numbers.

        `sequences`: those of a step's batch on one copy of the model, which micro-batches divide; None: not known. What the error
        proposes was tried.
        """
        try:
            made: Table = resolve(self.function)(num_ranks, microbatches, **self.options())
        except SpecError as error:
            fix = "; or ".join(self._ways(num_ranks, microbatches, sequences)) or error.fix
            raise SpecError(f"pipeline_parallel_schedule {self.kind}: {error.what}", fix=fix) from None
        return made

    def _ways(self, num_ranks: int, microbatches: int, sequences: int | None) -> list[str]:
        """Changes with which there is a table, each tried."""

        def works(function: str, ranks: int, count: int, **options: Any) -> bool:
            with suppress(SpecError):
                resolve(function)(ranks, count, **options)
                return True
            return False

        more = range(microbatches + 1, (sequences or _MOST_PASSES * num_ranks) + 1)
        counts = (
            count
            for count in more
            if not (sequences or 0) % count and works(self.function, num_ranks, count, **self.options())
        )
        found = [f"set gradient_accumulation_steps to {count}" for count in islice(counts, 1)]
        fewer = (
            ranks
            for ranks in range(num_ranks - 1, 1, -1)
            if works(self.function, ranks, microbatches, **self.options())
        )
        found += [f"set parallelism.pipeline_parallel_degree to {ranks}" for ranks in islice(fewer, 1)]
        if self.function != _PLAIN and works(_PLAIN, num_ranks, microbatches):
            found.append("take parallelism.pipeline_parallel_schedule 1f1b")
        return found

    def held(self, num_ranks: int) -> list[list[int]]:
        """The stages of each rank, which do not depend on the number of micro-batches."""
        table = self.table(num_ranks, 4 * num_ranks)
        return [table.held(rank) for rank in range(num_ranks)]
