"""Opens what shows a training while it runs: its logs, the view in a terminal, curves, and the notice of slow ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Draft
from hone.base.run import Progress, Run
from hone.measure.machine import machine_of
from hone.train.curves import wandb
from hone.train.live import profiling
from hone.train.live.screen import Screen
from hone.train.precision import TORCH_NAMES

if TYPE_CHECKING:
    from hone.train.loop import Trainer
    from hone.train.watch import Watch


def check(run: Run) -> None:
    """Raises SpecError or MissingExtra where `run` asks for a view that cannot be opened."""
    wandb.check(run)
    profiling.check(run)


def shown(run: Run, steps: int) -> AbstractContextManager[Progress]:
    """The progress of a training of `steps`."""
    options = {"ranks": run.mesh.world_size, "on_gpus": run.device.startswith("cuda")}
    return run.progress("train: step", steps, screen=partial(Screen.where_it_fits, **options))


def watch_of(
    spec: Any,
    draft: Draft,
    trainer: Trainer,
    progress: Progress,
    joules: Callable[[], float | None],
    kept: Callable[[], None],
    run: Run,
) -> Watch | None:
    """The logs of the training that `spec`, a `Train`, describes, on rank 0; every rank calls it. The peak of MFU is that of all ranks' devices."""
    from hone.train.live.rank_times import Stragglers
    from hone.train.watch import Watch

    hosts, grid = run.mesh.gather(socket.gethostname()), trainer.ranks.grid
    if not run.mesh.leads:
        return None
    calibration, config = machine_of(run).calibration, spec.parallelism.config(trainer.model)
    peak = calibration and calibration.peak_flops_per_s(TORCH_NAMES[spec.precision])
    stages = 1 if grid is None else grid.degrees.pp
    return Watch(
        draft.folder,
        draft.log,
        device=run.device,
        resume_at=trainer.done,
        tokens=trainer.tokens,
        # Of steps that write their own text, or that train other weights than the model's, no MFU is known.
        step_positions=0 if spec.objective.writes or spec.objective.trains_heads else spec.batch_size * spec.seq_len,
        forward_flops_per_token=config.flops_per_token(spec.seq_len),
        train_flops_per_token=config.train_flops_per_token(spec.seq_len),
        # A causal sequence of 2 n - 1 tokens has n positions to attend to on average: those of n tokens without a mask.
        full_flops_per_token=config.flops_per_token(2 * spec.seq_len - 1),
        peak_flops_per_s=peak and peak * run.mesh.world_size,
        progress=progress,
        kept=kept,
        curves=wandb.opened(run, draft, spec.model_dump(mode="json")),
        say=run.say,
        warn=run.warn,
        joules=joules,
        stragglers=Stragglers(hosts, stages) if len(hosts) > 1 else None,
        num_ranks=len(hosts),
    )
