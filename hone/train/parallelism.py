"""How the ranks of a training share its work: the degree of each axis of their grid. Names are torchtitan's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Circumstance, Spec
from hone.base.table import Choice, Technique
from hone.cost.dims import ModelDims
from hone.cost.train import experts as experts
from hone.cost.train.pipeline import Pipelined
from hone.cost.train.replicas import Divided
from hone.cost.train.tensor import Tensor, part_of
from hone.cost.train.update import UpdateCost
from hone.parallel.degrees import Degrees, data_ranks
from hone.train import CONTEXT_PARALLEL, DATA_PARALLEL, OFFLOADS, PIPELINE_SCHEDULES
from hone.train.context_parallel.techniques import Ring
from hone.train.data_parallel.ddp import DDP
from hone.train.expert_parallel.fits import check_fields
from hone.train.offload.techniques import Resident
from hone.train.pipeline.techniques import OneForwardOneBackward
from hone.train.routing.layouts import check_experts, expert_params

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from hone.base.ranks import Mesh
    from hone.cost.train.timed import Timed
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder
    from hone.parallel.grid import Grid
    from hone.train.loop import Trainer
    from hone.train.ranks import Ranks
    from hone.train.spikes.skip_step import SkipStep


class Shared(NamedTuple):
    """What the ranks of one layer, and those of the pipeline, hold; `update` is the step of a rank's part."""

    tensor: Tensor
    pipeline: Pipelined | None
    update: UpdateCost


class Parallelism(Spec):
    """The axes of the grid of ranks. Ranks that the other axes leave go to data parallelism."""

    data_parallel: Annotated[Technique, Choice(DATA_PARALLEL)] = Field(
        DDP(kind="ddp"), description="What of the training's state each of several ranks holds."
    )
    tensor_parallel_degree: int = Field(
        1,
        ge=1,
        description="Ranks that each compute a part of every layer, neighbours, which must have the fastest links.",
    )
    enable_sequence_parallel: bool = Field(
        True, description="Tensor-parallel ranks share the tokens of norms and residuals too."
    )
    enable_async_tensor_parallel: bool = Field(
        False,
        description="Their transfers are made in parts, beside the products at both ends; with sequence parallelism.",
    )

    expert_parallel_degree: int = Field(
        1,
        ge=1,
        description="Ranks that each hold a part of the experts of every layer; for all other weights they are data-parallel ranks.",
    )
    expert_parallel_comm_backend: Literal["standard", "peer_copies"] = Field(
        "standard",
        description="How their rows travel: by the collectives of NCCL or gloo, or by copy engines between GPUs of one host.",
    )

    context_parallel_degree: int = Field(1, ge=1, description="Ranks that share each sequence.")
    context_parallel: Annotated[Technique, Choice(CONTEXT_PARALLEL)] = Field(
        Ring(kind="ring"), description="How they attend to whole sequences."
    )

    pipeline_parallel_degree: int = Field(1, ge=1, description="Ranks that each compute some of the layers.")
    pipeline_parallel_schedule: Annotated[Technique, Choice(PIPELINE_SCHEDULES)] = Field(
        OneForwardOneBackward(kind="1f1b"),
        description="Order of the passes of a step's gradient_accumulation_steps micro-batches.",
    )

    pipeline_parallel_timeout_s: Annotated[float, Circumstance()] = Field(
        600.0,
        gt=0,
        description="Seconds that a rank waits for a message of another stage before all end with one error.",
    )

    offload: Annotated[Technique, Choice(OFFLOADS)] = Field(
        Resident(kind="none"),
        description="Where optimizer state, float32 masters, gradients and parameters are; several ranks: with zero1 to zero3.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Parallelism:
        if not self.data_parallel.exact and max(self.taken.values()) > 1:
            raise ValueError(f"data_parallel {self.data_parallel.kind} works with data-parallel ranks only")
        if self.pipeline_parallel_degree > 1 and self.data_parallel.sharded - {"optimizer"}:
            raise ValueError(
                f"data_parallel {self.data_parallel.kind} works without pipeline stages, whose many passes would each move "
                "weights or gradients: take zero1 or ddp"
            )
        check_fields(self)
        self.offload.with_axes(self.taken)
        if self.enable_async_tensor_parallel and self.tensor_parallel_degree == 1:
            raise ValueError("enable_async_tensor_parallel has no transfers to hide with tensor_parallel_degree 1")
        if self.enable_async_tensor_parallel and not self.enable_sequence_parallel:
            raise ValueError(
                "enable_async_tensor_parallel needs enable_sequence_parallel: sums of all tokens on all ranks have no parts that one rank ends with"
            )
        return self

    @property
    def exact(self) -> bool:
        """Whether losses and weights are those of one process: otherwise the ranks are part of a training's identity."""
        stages = self.pipeline_parallel_degree == 1 or self.pipeline_parallel_schedule.exact
        return self.data_parallel.exact and self.offload.exact and stages

    @property
    def taken(self) -> dict[str, int]:
        """The degrees of all axes but data parallelism, by their field."""
        return {
            "pipeline_parallel_degree": self.pipeline_parallel_degree,
            "expert_parallel_degree": self.expert_parallel_degree,
            "context_parallel_degree": self.context_parallel_degree,
            "tensor_parallel_degree": self.tensor_parallel_degree,
        }

    def degrees(self, num_ranks: int) -> Degrees:
        """The ranks along each axis. Raises SpecError when `num_ranks` cannot be divided."""
        divided = self.data_parallel.divided(data_ranks(num_ranks, **self.taken))
        return Degrees(
            pp=self.pipeline_parallel_degree,
            dp_replicate=divided.num_ranks // divided.num_shards,
            dp_shard=divided.num_shards,
            ep=self.expert_parallel_degree,
            cp=self.context_parallel_degree,
            tp=self.tensor_parallel_degree,
        )

    def divided(self, num_ranks: int) -> Divided:
        """The division of a training over `num_ranks` ranks, for estimates. Raises SpecError as `degrees` does."""
        degrees, ep, cp = self.degrees(num_ranks), self.expert_parallel_degree, self.context_parallel_degree
        divided = self.data_parallel.divided(degrees.dp // ep)
        shards = divided.num_shards * (ep * cp if self.data_parallel.sharded else 1)  # as the grid's copies
        moves = self.data_parallel.moves(shards)
        bits = {"weight_bits": moves.weight_bits, "gradient_bits": moves.gradient_bits}
        return replace(divided, num_ranks=divided.num_ranks * ep * cp, num_shards=shards, within=moves.within, **bits)

    @property
    def expert_rows(self) -> experts.ExpertRows:
        """What the rows of experts cost on their way."""
        return experts.ExpertRows(self.expert_parallel_degree, self.expert_parallel_comm_backend == "peer_copies")

    def with_experts(self, divided: Divided, config: ModelConfig) -> Divided:
        """`divided` of a model of `config`, whose experts expert-parallel ranks divide."""
        ranks = self.expert_parallel_degree
        if ranks == 1:
            return divided
        params = expert_params(config.local(self.tensor_parallel_degree))
        held = 1 - (params - params // ranks) / self.part_of(config).num_params
        return replace(divided, expert_ranks=ranks, experts=params / ranks / config.num_layers, held=held)

    def shared(
        self,
        config: ModelConfig,
        cost: Callable[[ModelDims], UpdateCost],
        micro_batches: int,
        seq_len: int,
        timed: Callable[[ModelDims], Timed | None] = lambda _: None,
    ) -> Shared:
        """What a rank holds of a model of `config`, for estimates; `cost` says what an optimizer's step of a part costs, `timed` how
        long the layers of a part take, by which they are divided into stages."""
        dims = config.dims()
        degree, sharers = self.tensor_parallel_degree, self.expert_parallel_degree
        local = config.local(degree) if degree > 1 else config
        # The part of an expert-parallel rank is that of one tensor-parallel rank.
        whole = dims if sharers == 1 else experts.part_of(dims, expert_params(config), sharers)
        update = cost(whole if sharers > 1 else config.trained_dims() or dims)
        part = whole if sharers > 1 else None
        if degree > 1:
            own = self.part_of(config)
            part = own if sharers == 1 else experts.part_of(own, expert_params(local), sharers)
        if degree > 1 and config.adapters:
            update = cost(local.trained_dims() or part)
        elif degree > 1:
            cost = _of_parts(cost, update, cost(part))
            update = replace(cost(part), matmuls=update.matmuls, num_repeats=update.num_repeats)  # of whole matrices
        tensor = Tensor(degree, self.enable_sequence_parallel, part, self.enable_async_tensor_parallel)
        if self.pipeline_parallel_degree == 1:
            return Shared(tensor, None, update)
        table = self.pipeline_parallel_schedule.table(self.pipeline_parallel_degree, micro_batches)
        # Where stages update at different times the division changes the result, which no measurement may.
        exact = self.pipeline_parallel_schedule.exact
        seconds = timed(part or dims) if exact else None
        layers = self.stages(config, seq_len, seconds)
        pipeline = Pipelined.of(table, layers, part or dims, cost)
        pipeline = replace(
            pipeline,
            begins=self._begins(config) if exact else (),
            cut_by="operations" if seconds is None else "their seconds as calibrated",
            copies=self.pipeline_parallel_schedule.copies,
            shared=degree if self.enable_sequence_parallel else 1,
        )
        return Shared(tensor, pipeline, pipeline.updates[pipeline.largest])

    def sequences(self, batch_size: int, micro_batches: int, num_ranks: int) -> int:
        """Sequences of one pass of one rank. Raises SpecError when the batch cannot be divided, or the schedule needs another
        number of micro-batches."""
        dp = self.degrees(num_ranks).dp
        if self.pipeline_parallel_degree > 1:
            each = batch_size // dp if batch_size % dp == 0 else None
            self.pipeline_parallel_schedule.table(self.pipeline_parallel_degree, micro_batches, each)
        parts = dp * micro_batches
        if batch_size % parts:
            raise SpecError(
                f"batch_size {batch_size} is not divisible into {dp} ranks x {micro_batches} micro-batches",
                fix=f"set batch_size to a multiple of {parts}, or start another number of ranks",
            )
        return batch_size // parts

    def check(self, config: ModelConfig, *, seq_len: int, teacher: ModelConfig | None = None) -> None:
        """Raises SpecError where the training of a model of `config` cannot be divided as these degrees say."""
        check_experts(config, self)
        if self.expert_parallel_degree > 1:
            from hone.train.expert_parallel.decoder import check_expert_parallel

            check_expert_parallel(config, self.expert_parallel_degree)
        self.stages(config, seq_len)
        if self.pipeline_parallel_degree > 1:
            self.pipeline_parallel_schedule.check_model(config)
        degree = self.tensor_parallel_degree
        if degree == 1:
            return
        from hone.train.tensor_parallel.decoder import check_tensor_parallel

        check_tensor_parallel(config, degree, overlap=self.enable_async_tensor_parallel)
        if teacher is not None:
            check_tensor_parallel(teacher, degree, "the teacher's ", overlap=self.enable_async_tensor_parallel)
        parts = degree * self.context_parallel_degree
        if self.enable_sequence_parallel and seq_len % parts:
            by = f"context_parallel_degree {self.context_parallel_degree} x " if parts > degree else ""
            raise SpecError(
                f"seq_len {seq_len} is not divisible by {by}tensor_parallel_degree {degree}",
                fix="change seq_len, or set parallelism.enable_sequence_parallel: false",
            )

    def check_steps(
        self, precision: str, intervals: Mapping[str, int], max_grad_norm: float, spikes: SkipStep | None
    ) -> None:
        """Raises ValueError where its techniques do not work with how steps are computed: see `DataParallel.check`."""
        self.data_parallel.check(precision, intervals, spikes=spikes)
        if self.pipeline_parallel_degree > 1:
            field = "" if spikes is None else spikes.field
            self.pipeline_parallel_schedule.check(precision=precision, max_grad_norm=max_grad_norm, spikes=field)

    def trainer(self) -> Callable[..., Trainer]:
        """The class of the loop's steps."""
        found = self.pipeline_parallel_schedule.trainer() if self.pipeline_parallel_degree > 1 else None
        return found or self.data_parallel.trainer()

    def stages(self, config: ModelConfig, seq_len: int, timed: Timed | None = None) -> list[range]:
        """The layers of each pipeline stage, by their seconds or by operations. Raises SpecError when they cannot be divided."""
        from hone.train.pipeline.stages import divide

        if self.pipeline_parallel_degree == 1:
            return [range(config.num_layers)]
        held = self.pipeline_parallel_schedule.held(self.pipeline_parallel_degree)
        return divide(config, 1 + max(max(one) for one in held), seq_len, timed)

    @staticmethod
    def _begins(config: ModelConfig) -> tuple[int, ...]:
        """The layers at which a pipeline stage may begin, without the first."""
        from hone.model.parallel.local import joined_layers

        joined = joined_layers(config)
        return tuple(index for index in range(1, config.num_layers) if index not in joined)

    def teacher(self, teacher: Decoder | None, ranks: Ranks) -> Decoder | None:
        """A teacher as this rank computes it: tensor-parallel ranks have parts of it, other axes divide it not at all."""
        if teacher is None or ranks.grid is None or ranks.grid.tp.size == 1:
            return teacher
        from hone.train.tensor_parallel.decoder import TensorParallelDecoder

        return TensorParallelDecoder(teacher.requires_grad_(False), ranks.grid.tp, **self._regions(ranks.grid))

    def _regions(self, grid: Grid) -> dict[str, Any]:
        """How tensor-parallel ranks share the tokens, for `TensorParallelDecoder`."""
        exchange = grid.exchange if self.enable_async_tensor_parallel else None
        return {"sequence": self.enable_sequence_parallel, "exchange": exchange}

    def part_of(self, config: ModelConfig) -> ModelDims:
        """What of a model one of the tensor-parallel ranks has."""
        degree = self.tensor_parallel_degree
        return part_of(config.local(degree).dims(), degree) if degree > 1 else config.dims()

    def decoder(self, model: Decoder, ranks: Ranks, seq_len: int, layers: Sequence[range] | None = None) -> Decoder:
        """This rank's part of `model`, with no axis that divides it the model itself; sequences have `seq_len` tokens.

        `layers` of each pipeline stage, as planned; None: by operations.
        """
        grid, config, rows = ranks.grid, model.config, None
        if grid is not None and grid.ep.size > 1:
            from hone.train.expert_parallel.decoder import ExpertParallelDecoder, check_expert_parallel, exchange_rows
            from hone.train.tensor_parallel.stacks import stacks

            check_expert_parallel(config, grid.ep.size)
            rows = grid.expert_exchange(self.expert_parallel_comm_backend)
        if grid is not None and grid.tp.size > 1:
            from hone.train.tensor_parallel.decoder import TensorParallelDecoder

            experts = None if rows is None else grid.ep
            model = TensorParallelDecoder(model, grid.tp, **self._regions(grid), experts=experts)
            if rows is not None:
                exchange_rows(model, rows)
        elif grid is not None and rows is not None:
            model = ExpertParallelDecoder(model, grid.ep, rows)
        if grid is not None and rows is not None:
            grid.divide_experts(name for name in model.cuts if name.rpartition(".")[0] in stacks(config))
        if ranks.pipeline is not None:
            ranks.pipeline.take(model, config, seq_len, layers)
        return model

    @staticmethod
    def parts(trainer: Trainer, *, wide: bool, keep: bool) -> Iterator[tuple[str, Module | None]]:
        """The parts of the whole model by path, each in memory until the next one is asked for; None for ranks without `keep`.

        `wide`: with the float32 masters as weights. Every rank asks for all of them, inside `Mesh.transfers`.
        """
        import torch

        from hone.model.decoder import parts_of

        model, stages = trainer.model, trainer.ranks.pipeline and trainer.ranks.pipeline.stages
        dtype = torch.float32 if wide else next(model.parameters()).dtype
        gather = getattr(model, "gather", None)
        for path in parts_of(model.config):
            with torch.no_grad(), trainer.update.weights.whole(path, wide=wide):
                part = stages.gather(model, path, trainer.device, dtype) if stages else model.get_submodule(path)
                yield path, gather(part, path, dtype, keep=keep) if gather else part

    @staticmethod
    def save(
        trainer: Trainer, tokenizer_from: Path, dtype: str, folder: Path, max_shard_bytes: int = 5 * 10**9
    ) -> ModelConfig:
        """Writes the model of all ranks, which all call it, into `folder`, in the torch `dtype`. Its config.

        Rank 0 writes it part by part, and holds the tensors of one file. Where `dtype` is not that in which it computes, the
        masters are what is saved: they are rounded once.
        """
        import torch

        from hone.model.decoder import unmade
        from hone.model.hf import part_state, save

        mesh, saved, config = trainer.ranks.mesh, getattr(torch, dtype), Parallelism.config(trainer.model)
        parts = Parallelism.parts(trainer, wide=saved != next(trainer.model.parameters()).dtype, keep=mesh.leads)
        copy = trainer.ranks.grid is not None  # what is gathered is freed before it is written

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for path, part in parts:
                for name, tensor in part_state(part, config, path):
                    yield name, tensor.to("cpu", copy=copy)

        with mesh.transfers():
            if mesh.leads:
                save(unmade(config), folder, tokenizer_from, saved, max_shard_bytes, tensors())
            else:
                for _ in parts:
                    pass
        return config

    @staticmethod
    def config(model: Decoder) -> ModelConfig:
        """The config of the whole model."""
        return getattr(model, "whole_config", model.config)

    def grid(self, mesh: Mesh, device: torch.device | str) -> Grid:
        """The axes of the ranks of `mesh`; every rank calls it. Raises SpecError as `degrees` does."""
        from hone.parallel.grid import Grid

        shards, alone = bool(self.data_parallel.sharded), self.data_parallel.alone
        return Grid(mesh, self.degrees(mesh.world_size), device, shards=shards, alone=alone)

    def ranks(self, mesh: Mesh, device: torch.device | str) -> Ranks:
        """The ranks of `mesh` as a trainer needs them; every rank calls it. Raises SpecError as `degrees` does."""
        from hone.train.context_parallel.context import ContextRanks
        from hone.train.ranks import Ranks

        if mesh.world_size == 1:
            return Ranks(mesh)
        grid = self.grid(mesh, device)
        pipeline, schedule = None, self.pipeline_parallel_schedule
        shared = ContextRanks(self.context_parallel, grid.cp) if grid.cp.size > 1 else None
        if grid.pp.size > 1:
            from hone.train.pipeline.passes import Pipeline

            pipeline = Pipeline(
                schedule, mesh, grid, shared, self.enable_sequence_parallel, self.pipeline_parallel_timeout_s
            )
        moves = self.data_parallel.moves(grid.copies.shard.size)
        return Ranks(mesh, grid, self.data_parallel.sharded, shared, self.data_parallel.summing(), pipeline, moves)

    def check_sequences(self, config: ModelConfig, seq_len: int) -> None:
        """Raises SpecError when the ranks cannot share the model's layers or sequences of `seq_len` tokens."""
        if self.context_parallel_degree > 1:
            local = config.local(self.tensor_parallel_degree)  # its heads
            self.context_parallel.check(local, seq_len, self.context_parallel_degree)

    def said(self, num_ranks: int) -> str:
        """What of it `num_ranks` ranks use, for the note of a figure."""
        stages, shared, parts = self.pipeline_parallel_degree, self.context_parallel_degree, self.tensor_parallel_degree
        # Of these, ranks that share sequences or experts are some: they hold the same weights but for experts.
        copies, expert = num_ranks // (stages * parts), self.expert_parallel_degree
        used = {
            self.data_parallel.kind: copies,
            f"{expert} ranks divide the experts": expert,
            f"{shared} ranks share each sequence ({self.context_parallel.kind})": shared,
            f"{stages} pipeline ranks ({self.pipeline_parallel_schedule.kind})": stages,
            f"{parts} tensor-parallel ranks": parts,
        }
        return ", ".join(words for words, degree in used.items() if degree > 1)


def _of_parts(
    cost: Callable[[ModelDims], UpdateCost], whole: UpdateCost, part: UpdateCost
) -> Callable[[ModelDims], UpdateCost]:
    """`cost` of a tensor-parallel rank's part of a model, or of some of its layers, with the states that such a rank has whole."""
    share = whole.whole_state_bytes / part.whole_state_bytes if part.whole_state_bytes else 1.0

    def of_part(dims: ModelDims) -> UpdateCost:
        found = cost(dims)
        more = (share - 1) * found.whole_state_bytes
        return replace(
            found,
            state_bytes=found.state_bytes + more,
            whole_state_bytes=found.whole_state_bytes + more,
            work_bytes=max(found.work_bytes, whole.work_bytes if found.matmuls else 0.0),
        )

    return of_part
