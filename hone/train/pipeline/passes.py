"""The passes of a rank of a pipeline: its stages of the model, run for each micro-batch in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.cost.pipeline.table import Op, Table, frozen
from hone.feed.load import Batch
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.linear import Dense
from hone.parallel.grid import Grid
from hone.parallel.pipeline.executor import Channels, Executor
from hone.train.activation_checkpointing import Segment
from hone.train.context_parallel.context import ContextRanks
from hone.train.passes import run_segments, to_device
from hone.train.pipeline.base import PipelineSchedule
from hone.train.pipeline.stages import Stages, divide

Objective = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""The scalar of (hidden states of the last layer, tokens, targets, context)."""


class Pipeline:
    """The ranks of `grid.pp` and their schedule. Every rank makes it at the same time; `take` gives it a model.

    `context`: the ranks that share this one's sequences.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        mesh: Mesh,
        grid: Grid,
        context: ContextRanks | None,
        sequence: bool,
        timeout_s: float,
    ) -> None:
        self.schedule, self.mesh, self.grid, self.context = schedule, mesh, grid, context
        self._rows = grid.tp.size if sequence else 1
        """Ranks among which the tokens between two layers are divided."""
        self.channels = Channels(mesh, grid.degrees.lines(("pp",)), grid.device, timeout_s)
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._now: _Run | None = None
        self.step: Callable[[int], None] | None = None
        """The optimizer's step inside the passes of an asynchronous schedule."""
        self.renew: Callable[[int], None] | None = None
        """As the executor's."""
        self._has_extra: bool | None = None
        """Whether a layer of any rank has a loss of its own; known after the first step."""
        self.stages: Stages | None = None

    def take(self, model: Decoder, config: ModelConfig, seq_len: int, layers: Sequence[range] | None = None) -> None:
        """Leaves this rank's stages in `model`, which is whole but for tensor parallelism; `config` is the whole model's.

        `layers` of each stage, the same on all ranks; None: by operations. Raises SpecError as `divide` does.
        """
        size = self.grid.pp.size
        held = self.schedule.held(size)
        layers = layers or divide(config, 1 + max(max(one) for one in held), seq_len)
        self.stages = Stages(model, layers, held, self.grid.pp)
        shared: dict[tuple[int, ...], list[str]] = {}
        for name, owners in self.stages.holders.items():
            if len(owners) > 1:
                shared.setdefault(owners, []).append(name)
        for owners, names in sorted(shared.items()):
            self.grid.share(names, owners)

    def train(
        self,
        model: Decoder,
        parts: Sequence[Batch],
        segments: Sequence[Segment],
        objective: Objective,
        shares: Sequence[tuple[float, float]],
        begin: Callable[[Any, int], None] = lambda context, place: None,
    ) -> tuple[tuple[Tensor, Tensor | None], list[dict[int, Tensor]]]:
        """All passes of a step: (sum of the objective, sum of the layers' own losses) of what this rank computed, and what routers counted
        in each of its passes (`Context.routing`).

        `shares`: of each micro-batch what an objective and a layer's loss are multiplied with before the backward pass. Gradients
        are added to the parameters' `grad`. All ranks return None for the second where no rank's layers have such a loss.
        `begin` is told of the context of each pass before it, and of the place of its micro-batch, from 1.
        """
        run = self._run(model, parts, segments, objective, shares, begin)
        zero = torch.zeros((), device=next(model.parameters()).device)
        extra = sum(run.extras.values(), zero) if run.extras else None
        if self._has_extra is None:
            said = torch.tensor([0.0 if extra is None else 1.0], dtype=torch.float64)
            self._has_extra = bool(self.mesh.sum(said) > 0)
        if self._has_extra and extra is None:
            extra = zero
        return (_sum(run.losses, zero), extra), run.routed

    def score(self, model: Decoder, batch: Batch, segments: Sequence[Segment], objective: Objective) -> float:
        """The objective of a batch on a rank that has the last stage, 0 on others. Without gradients."""
        run = self._run(model, [batch], segments, objective, None)
        return sum(loss.item() for loss in run.losses.values())

    def _run(
        self,
        model: Decoder,
        parts: Sequence[Batch],
        segments: Sequence[Segment],
        objective: Objective,
        shares: Sequence[tuple[float, float]] | None,
        begin: Callable[[Any, int], None] = lambda context, place: None,
    ) -> _Run:
        assert self.stages is not None, "take a model first"
        executor = self._executor(model, len(parts), trains=shares is not None)
        run = self._now = _Run(model, parts, segments, objective, shares, self.stages, self.context, begin)
        like = next(model.parameters())
        rows, length = parts[0].tokens.shape
        assert all(one.tokens.shape == (rows, length) for one in parts), "micro-batches of one size"
        try:
            executor.run(like.new_empty(rows, length // self._rows, model.config.hidden_size))
        finally:
            self._now = None
        return run

    def _executor(self, model: Decoder, microbatches: int, *, trains: bool) -> Executor:
        key = (trains, microbatches)
        if key not in self._executors:
            assert self.stages is not None, "take a model first"
            table = self.schedule.table(self.grid.pp.size, max(microbatches, 1) if trains else 4 * self.grid.pp.size)
            table = table if trains else _forwards(table)
            linears = [part for part in model.modules() if type(part) is Dense or hasattr(part, "deferring")]
            self._executors[key] = Executor(
                table, self.channels, self.stages.modules(model), self._pass,
                linears=linears, step=self.step, renew=self.renew,
            )  # fmt: skip
        return self._executors[key]

    def _pass(self, stage: int, microbatch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        assert self._now is not None, "a pass outside a run"
        return self._now.forward(stage, microbatch, x)


class _Run:
    """The micro-batches of one run and what its forward passes find."""

    def __init__(
        self,
        model: Decoder,
        parts: Sequence[Batch],
        segments: Sequence[Segment],
        objective: Objective,
        shares: Sequence[tuple[float, float]] | None,
        stages: Stages,
        context: ContextRanks | None,
        begin: Callable[[Any, int], None],
    ) -> None:
        self.model, self.parts, self.objective, self.shares = model, parts, objective, shares
        self.stages, self.context, self.begin = stages, context, begin
        self.routed: list[dict[int, Tensor]] = []
        """What routers counted in each pass."""
        self.segments = {stage: _inside(segments, stages.layers[stage]) for stage in stages.held}
        self.losses: dict[int, Tensor] = {}
        """The objective of each micro-batch whose last stage is here."""
        self.extras: dict[tuple[int, int], Tensor] = {}

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """As `Passes`."""
        device = next(self.model.parameters()).device
        tokens, targets, context = to_device(self.parts[microbatch], device, self.context)
        context.tokens = tokens
        if self.shares is not None:
            self.begin(context, microbatch + 1)
            self.routed.append(context.routing)
        x = self.model.embed(tokens) if x is None else x
        x = run_segments(self.model, x, context, self.segments[stage])
        own, extra = None, context.extra_loss
        if extra is not None:
            extra = extra * tokens.numel()
            self.extras[microbatch, stage] = extra.detach()
            # That of a router without weights is a number: it has no gradient.
            own = extra * self.shares[microbatch][1] if self.shares is not None and extra.requires_grad else None
        if stage < len(self.stages.layers) - 1:
            return x, own
        loss = self.objective(x, tokens, targets, context)
        self.losses[microbatch] = loss.detach()
        if self.shares is None:
            return None, None
        whole = loss * self.shares[microbatch][0]
        return None, whole if own is None else whole + own


def _inside(segments: Sequence[Segment], layers: range) -> list[Segment]:
    """The parts of `segments` in `layers`."""
    found = [one._replace(start=max(one.start, layers.start), stop=min(one.stop, layers.stop)) for one in segments]
    return [one for one in found if one.start < one.stop]


def _sum(losses: dict[int, Tensor], zero: Tensor) -> Tensor:
    """In the order of the micro-batches, as one process adds them."""
    for number in sorted(losses):
        zero = zero + losses[number]
    return zero


def _forwards(table: Table) -> Table:
    """The forward passes of the first micro-batch alone, in the order of `table`."""
    kept = [[Op("F", op.stage, 0) for op in ops if op.kind == "F" and op.microbatch == 0] for ops in table.ranks]
    return replace(table, name=f"forwards of {table.name}", ranks=frozen(kept), microbatches=1, steps=0, trains=False)
