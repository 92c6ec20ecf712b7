"""A step's loss and gradients computed once more by another rank, and compared before they change a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hone.base.errors import MachineError
from hone.train.faults.checks import Checks
from hone.train.faults.checksums import of_tensor
from hone.train.passes import Counts, Sums

if TYPE_CHECKING:
    from hone.feed.load import Batch
    from hone.train.checkpoint import Checkpoints
    from hone.train.update import Update
    from hone.train.watch import Watch

_MIX = 1_000_003
"""Odd, so that in 64 bits a sum of parts depends on their order and loses nothing."""


class Trainer(Protocol):
    """Of the loop's `Trainer`, what is compared."""

    done: int
    device: torch.device
    ranks: Any
    """The loop's `Ranks`."""
    update: Update
    rerun: Rerun | None
    tutor: Any
    """The loop's `Tutor`."""

    def gradients(self, batch: Batch) -> tuple[Sums, Counts]:
        """Computes and sums the gradients of this rank's part of a batch."""

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes the state."""


class Print(NamedTuple):
    """What is compared of a tensor, or of several one after the other."""

    bits: int
    squared_norm: float


def bits_of(tensor: Tensor) -> int:
    """A number that every changed bit of a tensor changes: CRC-32 on a CPU, on a GPU the sum of its words, computed there."""
    tensor = tensor.detach().contiguous()
    if not tensor.is_cuda:
        return of_tensor(tensor)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.view(words).sum(dtype=torch.int64).item())


class Rerun:
    """Compares steps of a trainer, those that `checks` names.

    Before such a step every data-parallel rank computes the next one's part of the batch; what it finds there of the loss and of
    every weight's gradient, before any sum over ranks, must be what the next one finds itself. Where they differ, both are
    computed once more: who does not repeat its own numbers is named, and where both do, a third rank decides. With one
    data-parallel rank it computes its own part twice.
    """

    def __init__(self, checks: Checks, failed: Callable[[str], None]) -> None:
        self.checks = checks
        self.failed = failed
        """Called on all ranks with what is wrong with a step whose weights are not changed yet; may raise."""
        self.read: Callable[[int], Batch] | None = None
        """The part of the batch of the step under way that data-parallel rank number `index` reads."""

    def due(self, trainer: Trainer) -> bool:
        """Whether the next step is one to compare."""
        return (trainer.done + 1) % self.checks.rerun_interval == 0

    def gradients(self, trainer: Trainer, batch: Batch) -> tuple[Sums, Counts]:
        """As `Trainer.gradients`, whose result it is, after a comparison."""
        assert self.read is not None, "a feed is needed to compute another rank's part"
        _, parts = trainer.ranks.data
        others = self._print(trainer, 1)
        result, own = self._recorded(trainer, batch)
        found = self._gathered(trainer, others, own)
        wrong = [group for group in range(parts) if self._differs(found[group][0], found[(group + 1) % parts][1])]
        if wrong:
            _drop_grads(trainer)
            said = self._who(trainer, found, wrong, parts)
            self.failed(f"step {trainer.done + 1}: {said}")
            result = trainer.gradients(batch)
        return result

    def _who(self, trainer: Trainer, found: _Found, wrong: list[int], parts: int) -> str:
        """Which data-parallel ranks of the pairs (group, next one) in `wrong` computed other numbers than they should."""
        again = self._gathered(trainer, self._print(trainer, 1), self._print(trainer, 0))
        third = self._gathered(trainer, self._print(trainer, 2), {}) if parts > 2 else None
        blamed: dict[int, str] = {}
        for group in wrong:
            following = (group + 1) % parts
            if self._differs(found[following][1], again[following][1]):
                blamed[following] = "does not repeat its own result"
            elif self._differs(found[group][0], again[group][0]):
                blamed[group] = "does not repeat its own result"
            elif third is not None:
                judge = (group - 1) % parts  # it has computed the part of `following`, two after it
                apart = self._differs(third[judge][0], found[following][1])
                blamed[following if apart else group] = "computes another result than two others, each time"
            else:
                blamed[group] = f"and the next one, of {parts}, compute different results, each time"
        everyone = range(trainer.ranks.mesh.world_size)
        names = {group: [rank for rank in everyone if _index(trainer, rank) == group] for group in blamed}
        said = [f"rank {', '.join(map(str, names[group]))} {why}" for group, why in sorted(blamed.items())]
        what = self._differs(found[wrong[0]][0], found[(wrong[0] + 1) % parts][1])
        return f"{'; '.join(said)} (first in {what})"

    def _print(self, trainer: Trainer, shift: int) -> Printed:
        """What this rank computes for the part of the data-parallel rank `shift` after it; the gradients are dropped."""
        assert self.read is not None, "set before the step"
        index, parts = trainer.ranks.data
        with torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []):
            _, found = self._recorded(trainer, self.read((index + shift) % parts))
        _drop_grads(trainer)
        return found

    def _recorded(self, trainer: Trainer, batch: Batch) -> tuple[tuple[Sums, Counts], Printed]:
        """The gradients of `batch`, and what is compared of them and of the loss."""
        with recording(trainer.update.weights.parameters) as found:
            result = trainer.gradients(batch)
            loss = result[0].loss.detach()
            found["the loss"] = Print(bits_of(loss), float(loss) ** 2)
        return result, found

    def _gathered(self, trainer: Trainer, others: Printed, own: Printed) -> _Found:
        """By data-parallel rank, what its ranks computed for another one and for itself."""
        found: _Found = {}
        for rank, (theirs, its) in enumerate(trainer.ranks.mesh.gather((others, own))):
            place = _place(trainer, rank)
            kept = found.setdefault(_index(trainer, rank), ({}, {}))
            for into, prints in zip(kept, (theirs, its), strict=True):
                into.update({f"{name}{place}": one for name, one in prints.items()})
        return found

    def _differs(self, one: Printed, other: Printed) -> str:
        """The first name that is not the same in both; ''."""
        for name, mine in one.items():
            theirs = other.get(name)
            if theirs is None or not (mine.bits == theirs.bits or self._near(mine.squared_norm, theirs.squared_norm)):
                return name
        return ""

    def _near(self, one: float, other: float) -> bool:
        return (
            abs(one**0.5 - other**0.5) <= self.checks.tolerance * max(one, other) ** 0.5 and self.checks.tolerance > 0
        )


Printed = dict[str, Print]
_Found = dict[int, tuple[Printed, Printed]]


@contextmanager
def recording(parameters: Mapping[str, nn.Parameter]) -> Iterator[Printed]:
    """Records the gradient that every backward pass inside computes on this rank for each of `parameters`, before any sum."""
    found: Printed = {}

    def record(name: str) -> Callable[[Tensor], None]:
        def take(gradient: Tensor | None) -> None:
            if gradient is None:  # a pipeline computes it later, and calls again
                return
            before = found.get(name, Print(0, 0.0))
            bits = (before.bits * _MIX + bits_of(gradient)) & (2**64 - 1)
            found[name] = Print(bits, before.squared_norm + float(gradient.detach().double().square().sum()))

        return take

    handles = [parameter.register_hook(record(name)) for name, parameter in parameters.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _index(trainer: Trainer, rank: int) -> int:
    """The data-parallel rank that `rank` is a part of."""
    if trainer.ranks.grid is None:
        return 0
    degrees = trainer.ranks.grid.degrees
    place = degrees.place(rank)
    return (place.dp_replicate * degrees.dp_shard + place.dp_shard) * degrees.ep + place.ep


def _drop_grads(trainer: Trainer) -> None:
    """Forgets the gradients of passes that were made to be compared."""
    trainer.update.weights.drop_grads()
    trainer.tutor.drop_grads()


def _place(trainer: Trainer, rank: int) -> str:
    """Where among the ranks of one data-parallel rank `rank` is."""
    if trainer.ranks.grid is None:
        return ""
    place = trainer.ranks.grid.degrees.place(rank)
    said = [
        f"{axis} {getattr(place, axis)}" for axis in ("pp", "cp", "tp") if getattr(trainer.ranks.grid.degrees, axis) > 1
    ]
    return f" on {', '.join(said)}" if said else ""


class Guard:
    """The checks of a training while it runs, as `checks` says. All ranks make one and call it at the same steps."""

    def __init__(self, checks: Checks, trainer: Trainer, checkpoints: Checkpoints | None, watch: Watch | None) -> None:
        self.checks, self.trainer, self.checkpoints, self.watch = checks, trainer, checkpoints, watch
        trainer.rerun = Rerun(checks, self._before_update) if checks.rerun_interval else None

    def reading(self, read: Callable[[int], Batch]) -> Batch:
        """This rank's part of the next step's batch, of which `read` gives that of any data-parallel rank."""
        if self.trainer.rerun is not None:
            self.trainer.rerun.read = read
        return read(self.trainer.ranks.data[0])

    def stepped(self, *, saves: bool) -> None:
        """After a step: compares weights where that is due; with `saves` a checkpoint or a model is about to be written, too."""
        interval = self.checks.replicas_interval
        if interval and (saves or self.trainer.done % interval == 0):
            said = check_replicas(self.trainer)
            if said:
                self._said(f"step {self.trainer.done}: {said}")

    def _before_update(self, said: str) -> None:
        """A step is wrong whose weights are not changed: what is saved is the state before it."""
        if self.checks.on_mismatch == "end" and self.checkpoints is not None:
            if self.watch is not None:
                self.watch.sync()
            self.trainer.save(self.checkpoints)
            self.checkpoints.finish()
        self._said(said)

    def _said(self, said: str) -> None:
        if self.checks.on_mismatch == "end":
            raise corrupted(said)
        if self.watch is not None:
            self.watch.say(f"silent corruption at {said}")


def check_replicas(trainer: Trainer) -> str:
    """Which ranks hold other bits of a weight than others that hold the same, with its name; ''. All ranks call it."""
    weights, grid = trainer.update.weights, trainer.ranks.grid
    if grid is None:
        return ""
    weights.ready()
    mine: dict[str, int] = {}
    for name, parameter in weights.parameters.items():
        if parameter.untyped_storage().size():  # not freed
            mine[name + _part(trainer, name)] = bits_of(parameter)
    for name, master in weights.masters.items():
        start, stop = weights.pieces.get(name, (0, master.numel()))
        where = f"{name}{_part(trainer, name)}, elements {start} to {stop}"
        mine[f"the master of {where}"] = bits_of(master)
        copies = trainer.update.copies(name)
        for key, state in trainer.update.states.get(name, {}).items():
            mine[f"{key} of {name if key in copies else where}"] = bits_of(state)
    everyone = trainer.ranks.mesh.gather(mine)
    for key in dict.fromkeys(key for one in everyone for key in one):
        held = {rank: one[key] for rank, one in enumerate(everyone) if key in one}
        values = list(held.values())
        usual = max(dict.fromkeys(values), key=values.count)
        others = [rank for rank, bits in held.items() if bits != usual]
        if others:
            alone = 2 * values.count(usual) > len(values)
            who = f"rank {', '.join(map(str, others))} has" if alone else f"ranks {', '.join(map(str, held))} have"
            return f"{who} other bits of {key} than the others" if alone else f"{who} different bits of {key}"
    return ""


def _part(trainer: Trainer, name: str) -> str:
    grid = trainer.ranks.grid
    if grid is None or name not in trainer.update.cuts:
        return ""
    return f" on ep {grid.ep.index}" if grid.ep.size > 1 else f" on tp {grid.tp.index}"


def corrupted(what: str) -> MachineError:
    """The error of a mismatch."""
    return MachineError(
        f"silent corruption at {what}",
        fix="take the machine of that rank out and test it, then start again: it resumes before the fault; "
        "checkpoint.check.on_mismatch: warn goes on instead",
    )
