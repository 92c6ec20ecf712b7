"""The pipeline schedules as techniques: in which order the ranks compute the passes of a step's micro-batches."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.base.table import Technique
from hone.parallel.pipeline.table import Table


class PipelineSchedule(Technique):
    """The micro-batches of a step (`gradient_accumulation_steps`) pass the stages in the order of a table.

    Losses and weights are those of one process, to the bit where a stage adds its micro-batches in their order.
    """

    function: ClassVar[str]
    """'module:name' of the table's function of ranks, micro-batches and options."""

    def options(self) -> dict[str, Any]:
        """What the function takes beside ranks and micro-batches."""
        return {}

    def table(self, num_ranks: int, microbatches: int) -> Table:
        """The passes of every rank. Raises SpecError where the schedule needs other numbers."""
        try:
            made: Table = resolve(self.function)(num_ranks, microbatches, **self.options())
        except SpecError as error:
            fix = "raise gradient_accumulation_steps, lower parallelism.pipeline_parallel_degree, or take 1f1b"
            raise SpecError(f"pipeline_parallel_schedule {self.kind}: {error.what}", fix=fix) from None
        return made

    def held(self, num_ranks: int) -> list[list[int]]:
        """The stages of each rank, which do not depend on the number of micro-batches."""
        table = self.table(num_ranks, 4 * num_ranks)
        return [table.held(rank) for rank in range(num_ranks)]


class _Chunked(PipelineSchedule):
    """A schedule with several stages a rank."""

    stages_per_rank: int = Field(2, ge=1, description="Stages of each rank, a stride of the number of ranks apart.")

    def options(self) -> dict[str, Any]:
        """Its stages."""
        return {"stages_per_rank": self.stages_per_rank}


class Naive(PipelineSchedule):
    """One micro-batch at a time passes all ranks, and all but one rank wait: the baseline."""

    function: ClassVar[str] = "hone.parallel.pipeline.schedules.naive:naive"


class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes: every micro-batch's activations are kept. Huang et al. 2018, arXiv:1811.06965."""

    paper: ClassVar[str] = "arXiv:1811.06965"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.gpipe:gpipe"


class OneForwardOneBackward(PipelineSchedule):
    """Forward and backward passes in turn: activations of as many micro-batches as ranks at most (PipeDream-Flush). Narayanan et al. 2021, arXiv:2104.04473."""

    paper: ClassVar[str] = "arXiv:2104.04473"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.one_forward_one_backward:one_forward_one_backward"


class Interleaved(_Chunked):
    """As 1f1b, with several stages a rank: less waiting, more messages. Narayanan et al. 2021, arXiv:2104.04473; any number of micro-batches as in arXiv:2407.21783."""

    paper: ClassVar[str] = "arXiv:2104.04473"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.interleaved:interleaved"


class BreadthFirst(_Chunked):
    """As gpipe, with several stages a rank: all micro-batches of one before the next. Lamy-Poirier 2022, arXiv:2211.05953."""

    paper: ClassVar[str] = "arXiv:2211.05953"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.breadth_first:breadth_first"


class ZbH1(PipelineSchedule):
    """As 1f1b, with weight gradients computed where ranks would wait; memory as 1f1b. Qi et al. 2023, arXiv:2401.10241."""

    paper: ClassVar[str] = "arXiv:2401.10241"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.zero_bubble:zb_h1"


class ZbH2(PipelineSchedule):
    """As zb_h1, with more forward passes ahead: less waiting, up to twice the activations. Qi et al. 2023, arXiv:2401.10241."""

    paper: ClassVar[str] = "arXiv:2401.10241"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.zero_bubble:zb_h2"


class ZbV(PipelineSchedule):
    """Two stages a rank, down the ranks and up again, with weight gradients where ranks would wait. Qi et al. 2024, arXiv:2405.15362."""

    paper: ClassVar[str] = "arXiv:2405.15362"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.zero_bubble_v:zb_v"


class DualPipe(PipelineSchedule):
    """Micro-batches enter at both ends; every stage is on two ranks, which add their gradients. DeepSeek-AI 2024, arXiv:2412.19437."""

    paper: ClassVar[str] = "arXiv:2412.19437"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.dualpipe:dualpipe"


class DualPipeV(PipelineSchedule):
    """DualPipe cut in half: two stages a rank, each stage once. Qi et al. 2025 (sail-sg), after DeepSeek-AI 2024, arXiv:2412.19437."""

    paper: ClassVar[str] = "arXiv:2412.19437"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.dualpipe:dualpipe_v"
