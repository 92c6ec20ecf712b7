"""Where a training starts that goes on from another one: what it reads of the model it is given, and from which place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from hone.base.artifact import MANIFEST
from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.base.identity import changed_file
from hone.feed.order.base import Curriculum
from hone.model.facts import TRAINING_STATE, CheckpointFacts, Position, Trained
from hone.train.schedules.base import Schedule, span

if TYPE_CHECKING:
    from hone.base.ranks import Mesh
    from hone.train.checkpoint import SavedTensors
    from hone.train.loop import Trainer

Load = Literal["weights", "data_position", "optimizer", "schedule"]
"""What a training reads of its model, each with all before it."""

_OF_A_STEP = (
    "optimizer",
    "objective",
    "mixture",
    "precision",
    "batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
)
"""Fields of a spec that say what a step does, beside those that say which sequences it reads."""


class Training(Protocol):
    """The fields of a train spec on which a start depends."""

    @property
    def checkpoint(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def curriculum(self) -> Curriculum: ...
    @property
    def mixture(self) -> Any: ...
    @property
    def parallelism(self) -> Any: ...
    @property
    def seed(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def precision(self) -> str: ...

    @classmethod
    def read(cls, values: Any, context: dict[str, bool] | None = None) -> Self: ...
    def identity(self) -> dict[str, Any]: ...
    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Start:
    """The place at which a training starts: of a new one the first step, on the first sequence."""

    load: Load = "weights"
    at: Position = field(default_factory=lambda: Position(steps=0, total_steps=0, warmup=0, tokens=0, sequences=0))
    """The steps done, in whose place the schedule goes on, and what was read of each source."""
    where: str = ""
    """The training that it goes on from."""
    state: Path | None = None
    """The checkpoint from which weights and optimizer come; None: the weights are those of the model."""
    before: Schedule | None = None
    """The schedule of the steps done, its warm-up in steps."""
    same_precision: bool = True
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self.at.steps

    def sequences(self, steps: int, batch_size: int) -> int:
        """Sequences read when `steps` are done, from the first step of the schedule."""
        return self.at.sequences + (steps - self.step) * batch_size

    def left(self, steps: int) -> int:
        """The steps that are not done of a training of `steps`. Raises SpecError when there are none."""
        if steps <= self.step:
            raise SpecError(
                f"{self.where} has done {self.step} steps, and the whole training has {steps}",
                fix=f"with checkpoint.load: schedule, steps counts those that are done: give more than {self.step}",
            )
        return steps - self.step

    def schedule(self, schedule: Schedule, steps: int) -> Schedule:
        """`schedule` over `steps` as it goes on. A warm-up that is a share is one of the training in which it was.

        Raises SpecError when the steps done would have had other learning rates in a training of `steps`.
        """
        if self.before is None:
            return schedule
        if schedule.warmup < 1:
            schedule = schedule.model_copy(update={"warmup": self.before.warmup})
        step = differs(self.before, self.at.total_steps, schedule, steps, self.step)
        if step is not None:
            raise SpecError(
                f"{told_difference(self.before, self.at.total_steps, schedule, steps, step)}: the weights of "
                f"{self.where} are not those that a training of {steps} steps has there",
                fix="checkpoint.load: optimizer begins a schedule anew with the optimizer's state; to prolong a training "
                "without a difference take schedule: wsd, whose stable phase has no end",
            )
        return schedule

    def place(
        self, schedule: Schedule, total: int, done: int, tokens: int, sequences: int, sources: Mapping[str, int]
    ) -> Position:
        """The place when `done` of `total` steps are done, and `tokens` and `sequences` read, of each source `sources`."""
        return Position(
            steps=done,
            total_steps=total,
            warmup=span(schedule.warmup, total),
            tokens=tokens,
            sequences=sequences,
            sources={**self.at.sources, **sources},
        )

    def place_of(
        self,
        schedule: Schedule,
        total: int,
        batch_size: int,
        sources: Callable[[int], Mapping[str, int]],
        trainer: Trainer,
    ) -> Position:
        """The place of `trainer`; `sources` says how many of a number of sequences are of each source."""
        read = self.sequences(trainer.read, batch_size)
        return self.place(schedule, total, trainer.done, trainer.tokens, read, sources(read))

    def restore(self, trainer: Trainer) -> None:
        """Gives `trainer` the weights and the optimizer's state that the training before had at this place."""
        if self.state is None:
            return
        stored, numbers = read_state(self.state, trainer.ranks.mesh)
        numbers |= {"done": self.at.steps, "tokens": self.at.tokens}
        numbers.pop("rewound", None)  # `at` has the batches that were left out
        if not self.same_precision:  # the loss scale of another precision
            numbers["scaler"] = trainer.scaler.state()
        if self.before is None:  # losses and norms under another schedule, maybe of other data, say nothing of spikes
            numbers["spikes"] = {}
        trainer.restore(stored, numbers)


def start_of(spec: Training, data: Sequence[str], model: CheckpointFacts | None) -> Start:
    """The start of a training of `spec` on `data` (the marks of its data) from `model`.

    Raises SpecError when the model has not what the spec wants to load.
    """
    trained = None if model is None else model.trained
    if spec.checkpoint.load in ("optimizer", "schedule"):
        need_state(spec, model)
    if model is None or trained is None or spec.checkpoint.load == "weights":
        return Start()
    wants_state = spec.checkpoint.load in ("optimizer", "schedule")
    at = trained.kept if wants_state else trained.ended
    before, why, notes = None, "it does not say where it ended", []
    with suppress(SpecError):  # made with techniques that are not installed here, say
        before = type(spec).read(trained.spec)
    if before is not None and at is not None:
        why = why_not_on(spec, before, trained, data)
    if at is None or why:
        notes.append(f"data: read from their start, not on from where {model.where} ended: {why}")
    else:
        place = f"sequence {at.sources[data[0]]:,}, " if len(data) == 1 and data[0] in at.sources else ""
        each = "each source is " if len(data) > 1 or spec.mixture is not None else ""
        notes.append(f"data: {each}read on from {place}where {model.where} was after {at.steps:,} steps")
    sources = at.sources if at is not None and not why else {}
    begin = Position(steps=0, total_steps=0, warmup=0, tokens=0, sequences=0, sources=sources)
    if not wants_state:
        return Start(spec.checkpoint.load, begin, model.where, notes=tuple(notes))
    assert at is not None and before is not None, "its state was checked"
    where = trained.state or f"{model.where}/{TRAINING_STATE}"
    size = f" ({human_bytes(sum(path.stat().st_size for path in trained.state.iterdir()))})" if trained.state else ""
    notes.insert(0, f"weights and state of {spec.optimizer.kind}: those after step {at.steps:,}, from {where}{size}")
    found: dict[str, Any] = {"state": trained.state, "same_precision": spec.precision == before.precision}
    if spec.checkpoint.load == "schedule":
        begin = at.model_copy(update={"sources": sources, "sequences": 0 if why else at.sequences})
        found["before"] = before.schedule.model_copy(update={"warmup": at.warmup})
        others = other_fields(spec, before)
        if others:
            notes.append(f"{', '.join(others)}: other than before, so one long training would have other weights")
    return Start(spec.checkpoint.load, begin, model.where, notes=tuple(notes), **found)


def need_state(spec: Training, model: CheckpointFacts | None) -> None:
    """Raises SpecError unless `model` kept a state that a training of `spec` can go on with."""
    wanted, fix = f"checkpoint.load: {spec.checkpoint.load}", "or load less: checkpoint.load: data_position"
    trained = None if model is None else model.trained
    if model is None:
        raise SpecError(f"{wanted} needs a model to go on from", fix=f"give --from.model=FOLDER, {fix}")
    if trained is None:
        raise SpecError(f"{wanted}: {model.where} is not the model of a training by hone", fix=fix.removeprefix("or "))
    before = type(spec).read(trained.spec)
    if not before.checkpoint.keep.optimizer:
        raise SpecError(
            f"{wanted}: {model.where} kept no state of its optimizer",
            fix=f"train it with --checkpoint.keep=optimizer, {fix}",
        )
    if trained.kept is None:
        raise SpecError(
            f"{wanted}: {model.where}/{TRAINING_STATE}, which it kept, is not there any more",
            fix=f"put it back, {fix}",
        )
    if before.optimizer.kind != spec.optimizer.kind:
        raise SpecError(
            f"{wanted}: the state in {model.where} is that of {before.optimizer.kind}, the optimizer is {spec.optimizer.kind}",
            fix=f"take optimizer: {before.optimizer.kind}, {fix}",
        )
    divided = before.parallelism.data_parallel, spec.parallelism.data_parallel
    if not all(one.exact for one in divided) and divided[0] != divided[1]:
        raise SpecError(
            f"{wanted}: {model.where} was trained with data_parallel {divided[0].kind}, whose state {divided[1].kind} does not read",
            fix=f"take its parallelism.data_parallel, {fix}",
        )
    delayed = [not one.parallelism.offload.exact for one in (before, spec)]
    if delayed[0] and not delayed[1]:
        raise SpecError(
            f"{wanted}: {model.where} was trained with offload.delayed_update, whose state has the weights of an update that is due",
            fix=f"take its parallelism.offload, {fix}",
        )
    if trained.state is not None:
        unchanged(trained.state, model.where)


def unchanged(state: Path, where: str) -> None:
    """Raises SpecError when a file of the kept `state` is missing or not the one that was written."""
    from hone.base.artifact import Artifact

    made = Artifact.read(state.parent.parent)
    rows = {name: row for name, row in made.manifest["files"].items() if name.startswith(f"{TRAINING_STATE}/")}
    name = changed_file(made.folder, rows, made.folder / MANIFEST)
    if name is not None:
        raise SpecError(
            f"{made.folder / name} is missing or no longer the file that {where} kept",
            fix="put it back, or load less: checkpoint.load: data_position",
        )


def why_not_on(spec: Training, before: Training, trained: Trained, data: Sequence[str]) -> str:
    """Why a training of `spec` cannot read its data on from where `before` ended; '' when it can."""
    if not set(data) & set(trained.data):
        return "it was trained on other data"
    for name in ("seed", "seq_len"):
        one, other = getattr(before, name), getattr(spec, name)
        if one != other:
            return f"its {name} is {one}, here it is {other}, which gives sequences in another order"
    by = [None if one.mixture is None else one.mixture.by for one in (before, spec)]
    if by[0] != by[1] and len(data) == 1:
        return "its sources are others"
    for one in (before, spec):
        if one.curriculum.kind != "random":
            return f"curriculum {one.curriculum.kind} orders the sequences of one training"
    return ""


def other_fields(spec: Training, before: Training) -> list[str]:
    """The fields in which steps of the two differ."""
    one, other = before.identity(), spec.identity()
    return [name for name in _OF_A_STEP if one.get(name) != other.get(name)]


def differs(before: Schedule, total: int, now: Schedule, steps: int, done: int) -> int | None:
    """The first of `done` steps at which `before`, over `total` steps, and `now`, over `steps`, differ; None: they do not."""
    if before == now and total == steps:
        return None
    return next((step for step in range(done) if before.share(step, total) != now.share(step, steps)), None)


def told_difference(before: Schedule, total: int, now: Schedule, steps: int, step: int) -> str:
    """In words, that the learning rate at `step` differs."""
    shares = before.share(step, total), now.share(step, steps)
    return (
        f"at step {step + 1} the learning rate was {shares[0]:.4g} of its peak, with {before.kind} over {total} steps, and is "
        f"{shares[1]:.4g} with {now.kind} over {steps}"
    )


def trained_as(
    spec: Training, start: Start, data: Sequence[str], schedule: Schedule, steps: int, filled: float
) -> Trained:
    """What will be known of a training of `spec` that takes `steps`, before it runs; of its positions `filled` are no padding.

    Raises SpecError when its ranks have different weights at the step whose state it keeps.
    """
    at, each = schedule.kept_after(steps), spec.parallelism.data_parallel.meets_every
    if spec.checkpoint.keep.optimizer and at % each and at != steps:
        raise SpecError(
            f"the state after step {at}, before the decay, is to be kept, and the ranks have the same weights every {each} steps",
            fix=f"set schedule.decay so that it begins after a multiple of {each} steps",
        )

    def place(done: int) -> Position:
        tokens = start.at.tokens + round((done - start.step) * spec.batch_size * spec.seq_len * filled)
        return start.place(schedule, steps, done, tokens, start.sequences(done, spec.batch_size), {})

    kept = place(at) if spec.checkpoint.keep.optimizer else None
    return Trained(spec=spec.model_dump(mode="json"), data=tuple(data), ended=place(steps), kept=kept)


def read_state(folder: Path, mesh: Mesh) -> tuple[SavedTensors, dict[str, Any]]:
    """(tensors, numbers) of the checkpoint in `folder`, which all ranks read. Raises ArtifactError when it is damaged."""
    from hone.train.checkpoint import verified

    return verified(folder, mesh)
