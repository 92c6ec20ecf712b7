"""Profiles of a running training: chrome traces of chosen steps of every rank, and snapshots of a GPU's memory."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from hone.base.errors import FitError, SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.base.spec import Spec

if TYPE_CHECKING:
    from hone.train.loop import Trainer

torch = lazy("torch")

MOST_EVENTS = 100_000
"""Allocations and frees that a snapshot remembers, as torchtitan's do."""


class Profiling(Spec):
    """What is profiled; the names are torchtitan's."""

    enable_profiling: bool = Field(
        False, description="Write chrome traces of every rank, one every profile_freq steps."
    )
    save_traces_folder: str = Field(
        "profile_traces", min_length=1, description="Folder of the traces, in OUT.profiling if it is relative."
    )
    profile_freq: int = Field(10, gt=0, description="Steps between traces, and between memory snapshots.")
    profiler_active: int = Field(1, gt=0, description="Steps in a trace: the last ones of profile_freq.")
    profiler_warmup: int = Field(
        3, ge=0, description="Steps before them that are traced and dropped, because the first ones are slower."
    )
    enable_memory_snapshot: bool = Field(
        False,
        description="Record every allocation on the GPU; write a snapshot every profile_freq steps and when memory is short.",
    )
    save_memory_snapshot_folder: str = Field(
        "memory_snapshot", min_length=1, description="Folder of the snapshots, in OUT.profiling if it is relative."
    )

    @model_validator(mode="after")
    def _fits(self) -> Profiling:
        if self.enable_profiling and self.profiler_active + self.profiler_warmup > self.profile_freq:
            raise ValueError(
                f"profile_freq {self.profile_freq} is less than profiler_warmup {self.profiler_warmup} + profiler_active "
                f"{self.profiler_active}"
            )
        return self


def check(run: Run) -> None:
    """Raises SpecError for a wrong field, and for snapshots of a CPU's memory, of which torch keeps no record."""
    if run.profiling is None:
        return
    if Profiling.read(run.profiling).enable_memory_snapshot and not run.device.startswith("cuda"):
        raise SpecError(
            f"profiling.enable_memory_snapshot records a GPU's memory, and this runs on {run.device}",
            fix="add --device=cuda, or leave it out; --profiling.enable_profiling traces a CPU's steps",
        )


def from_options(options: Mapping[str, str]) -> dict[str, Any] | None:
    """The value of `Run.profiling` from the options `profiling.FIELD`; None without them. Raises SpecError."""
    fields = {
        name.removeprefix("profiling."): value for name, value in options.items() if name.startswith("profiling.")
    }
    if not fields:
        return None
    spec = Profiling.from_overrides(fields)
    if not (spec.enable_profiling or spec.enable_memory_snapshot):
        given = ", ".join(f"--profiling.{name}" for name in fields)
        raise SpecError(
            f"{given} without anything to write",
            fix="add --profiling.enable_profiling or --profiling.enable_memory_snapshot",
        )
    return spec.model_dump(mode="json")


class Profiler:
    """Profiles the steps of `trainer` inside the block, as `run` says; nothing without it.

    A trace is `save_traces_folder`/iteration_STEP/rankRANK_trace.json, which Perfetto and chrome://tracing show; a snapshot is
    `save_memory_snapshot_folder`/iteration_STEP/rankRANK_memory_snapshot.pickle, for pytorch.org/memory_viz; that of a step
    that ran out of memory has `_exit` after STEP. Both lie in the folder `target`.profiling, beside the artifact.
    """

    def __init__(self, run: Run, target: Path, trainer: Trainer) -> None:
        self._spec = Profiling() if run.profiling is None else Profiling.read(run.profiling)
        self._trainer, self._rank, self._say = trainer, run.mesh.rank, run.say
        self._on_gpu = run.device.startswith("cuda")
        self.folder = target.with_name(target.name + ".profiling").absolute()
        self._traces: Any = None

    def __enter__(self) -> Profiler:
        spec = self._spec
        if spec.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        if spec.enable_profiling:
            profiler = torch.profiler
            waits = spec.profile_freq - spec.profiler_warmup - spec.profiler_active
            self._traces = profiler.profile(
                activities=[profiler.ProfilerActivity.CPU, *[profiler.ProfilerActivity.CUDA] * self._on_gpu],
                schedule=profiler.schedule(wait=waits, warmup=spec.profiler_warmup, active=spec.profiler_active),
                on_trace_ready=self._trace,
                record_shapes=True,
            )
            self._traces.start()
        if spec.enable_profiling or spec.enable_memory_snapshot:
            self._say(f"profiles: {self.folder}")
        return self

    def after(self, then: Callable[[Trainer, float | None], None]) -> Callable[[Trainer, float | None], None]:
        """What to call after each step: this, then `then`."""

        def stepped(trainer: Trainer, val_loss: float | None) -> None:
            if self._traces is not None:
                with warnings.catch_warnings():  # that a cycle has its own events alone, which is what is wanted
                    warnings.filterwarnings("ignore", message=".*Profiler clears events")
                    self._traces.step()
            if self._spec.enable_memory_snapshot and trainer.done % self._spec.profile_freq == 0:
                self._snapshot(f"iteration_{trainer.done}")
            then(trainer, val_loss)

        return stepped

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._traces is not None:
            self._traces.on_trace_ready = None  # a part of a cycle is no trace of the steps that were asked for
            self._traces.stop()
        if self._spec.enable_memory_snapshot:
            if isinstance(error, FitError):
                with suppress(OSError):  # the error that is to be said is another one
                    path = self._snapshot(f"iteration_{self._trainer.done + 1}_exit")
                    print(f"what filled the memory of rank {self._rank}: {path}", file=sys.stderr)
            torch.cuda.memory._record_memory_history(enabled=None)

    def _trace(self, traces: Any) -> None:
        path = self._place(self._spec.save_traces_folder, f"iteration_{self._trainer.done}")
        traces.export_chrome_trace(str(path / f"rank{self._rank}_trace.json"))

    def _snapshot(self, name: str) -> Path:
        path = self._place(self._spec.save_memory_snapshot_folder, name) / f"rank{self._rank}_memory_snapshot.pickle"
        with open(path, "wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
        return path

    def _place(self, folder: str, name: str) -> Path:
        path = self.folder / folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path
