"""The pipeline schedules as techniques: in which order the ranks compute the passes of a step's micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.train.pipeline.base import PipelineSchedule

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


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

    contiguous: int | None = Field(
        None,
        ge=1,
        description="Micro-batches in a row through a stage before the rank's next one; empty: as many as ranks. More hide transfers, and hold more.",
    )

    def options(self) -> dict[str, Any]:
        """Its stages and rows."""
        return {**super().options(), "contiguous": self.contiguous}

    def held(self, num_ranks: int) -> list[list[int]]:
        """As `PipelineSchedule.held`."""
        return [list(range(rank, num_ranks * self.stages_per_rank, num_ranks)) for rank in range(num_ranks)]


class BreadthFirst(_Chunked):
    """As gpipe, with several stages a rank: all micro-batches of one before the next. Lamy-Poirier 2022, arXiv:2211.05953."""

    paper: ClassVar[str] = "arXiv:2211.05953"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.breadth_first:breadth_first"


class _ZeroBubble(PipelineSchedule):
    """A schedule whose ranks end their passes at different times."""

    post_validation: bool = Field(
        False,
        description="Update before the global norm is known, and take that back, to the bit, where it is clipped.",
    )

    @property
    def copies(self) -> bool:
        """As `PipelineSchedule.copies`."""
        return self.post_validation

    @property
    def steps(self) -> str:
        """As `PipelineSchedule.steps`."""
        return "hone.train.pipeline.post_validation:PostValidatedTrainer" if self.post_validation else ""


class ZbH1(_ZeroBubble):
    """As 1f1b, with weight gradients computed where ranks would wait; memory as 1f1b. Qi et al. 2023, arXiv:2401.10241."""

    paper: ClassVar[str] = "arXiv:2401.10241"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.zero_bubble:zb_h1"


class ZbH2(_ZeroBubble):
    """As zb_h1, with more forward passes ahead: less waiting, up to twice the activations. Qi et al. 2023, arXiv:2401.10241."""

    paper: ClassVar[str] = "arXiv:2401.10241"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.zero_bubble:zb_h2"


class ZbV(_ZeroBubble):
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


class _Asynchronous(PipelineSchedule):
    """A schedule with several updates of each stage in a step. Its passes read weights of earlier updates, so results are its own."""

    exact: ClassVar[bool] = False

    @property
    def steps(self) -> str:
        """As `PipelineSchedule.steps`."""
        return "hone.train.pipeline.asynchronous:AsynchronousTrainer"

    def check(self, *, precision: str, max_grad_norm: float, spikes: str) -> None:
        """As `PipelineSchedule.check`: a rank updates its stage before others have their gradients."""
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"pipeline_parallel_schedule {self.kind} works in fp32 and bf16, not in {precision}")
        if max_grad_norm:
            raise ValueError(
                f"pipeline_parallel_schedule {self.kind} updates a stage before the gradients of the others are there, so that "
                "there is no global norm to clip to: set max_grad_norm: 0, or take 1f1b"
            )
        if spikes:
            raise ValueError(
                f"{spikes} does not work with pipeline_parallel_schedule {self.kind}: a step's loss is known after its updates"
            )

    def check_model(self, config: ModelConfig) -> None:
        """As `PipelineSchedule.check_model`: the first and the last stage would update one matrix at different times."""
        if config.tie_embeddings:
            raise SpecError(
                f"pipeline_parallel_schedule {self.kind} and a tied embedding: the first and the last stage both have it, and "
                "update it at different times",
                fix="set model.tie_embeddings: false, or take 1f1b",
            )


class PipeDream(_Asynchronous):
    """An update a micro-batch, without a flush before it; a backward pass reads the weights of its forward pass (weight stashing). Narayanan et al. 2019, arXiv:1806.03377."""

    paper: ClassVar[str] = "arXiv:1806.03377"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.pipedream:pipedream"


class PipeDreamVertical(_Asynchronous):
    """As pipedream, and a micro-batch reads on all stages the weights after the same number of updates (vertical sync). Narayanan et al. 2019, arXiv:1806.03377."""

    paper: ClassVar[str] = "arXiv:1806.03377"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.pipedream:pipedream_vertical"


class PipeDream2BW(_Asynchronous):
    """An update for several micro-batches, which reads the weights of one update before: two versions a stage. Narayanan et al. 2020, arXiv:2006.09503."""

    paper: ClassVar[str] = "arXiv:2006.09503"
    function: ClassVar[str] = "hone.parallel.pipeline.schedules.pipedream:pipedream_2bw"

    accumulation: int | None = Field(
        None, ge=1, description="Micro-batches of an update, at least as many as ranks; empty: as many."
    )

    def options(self) -> dict[str, Any]:
        """Its micro-batches."""
        return {"accumulation": self.accumulation}

    def held(self, num_ranks: int) -> list[list[int]]:
        """As `PipelineSchedule.held`."""
        return [[rank] for rank in range(num_ranks)]
