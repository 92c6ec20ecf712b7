"""A pipeline schedule as data: the passes of every rank in order, and what each pass waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hone.base.errors import SpecError

Kind = Literal["F", "B", "I", "W", "S"]


class Op(NamedTuple):
    """One pass of a stage over one microbatch.

    Kinds: F forward; B the whole backward; I the gradients of inputs alone and W those of weights, which together are B;
    S the optimizer's step of an asynchronous schedule. `version`: the weights that F, B, I and W read, or S writes. `paired`: in
    what is published it overlaps with the rank's next pass, one a forward and one a backward. The executor runs them in turn.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    version: int = 0
    paired: bool = False

    def __str__(self) -> str:
        which = f" of microbatch {self.microbatch}" if self.kind != "S" else ""
        return f"{self.kind} of stage {self.stage}{which}" + (f", version {self.version}" if self.version else "")


class Result(NamedTuple):
    """What a pass makes: F an activation, I a gradient of the stage's input, W the gradient of its weights."""

    kind: Literal["F", "I", "W"]
    stage: int
    microbatch: int


class Turn(NamedTuple):
    """A pass in an order in which every pass comes after all that it waits for: turns are numbered in it.

    `before` is its rank's turn before it, -1 of the first one; `sent` are the turns of other ranks that make its inputs. What its
    own rank makes for it is there when the turn before has ended.
    """

    rank: int
    op: Op
    before: int
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """A schedule: `ranks[r]` are the passes of rank r in their order; `place(stage, microbatch)` is the rank of a pass.

    That the place depends on the microbatch is for DualPipe, where every stage is on two ranks. `steps` are the
    optimizer's steps inside the table; 0 for a synchronous schedule, whose step follows it.
    """

    name: str
    ranks: tuple[tuple[Op, ...], ...]
    stages: int
    microbatches: int
    place: Callable[[int, int], int]
    steps: int = 0
    trains: bool = True
    """Whether there are backwards; else the table is of forwards alone."""

    def held(self, rank: int) -> list[int]:
        """The stages whose weights this rank has."""
        return sorted({op.stage for op in self.ranks[rank]})

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """All passes, each after what it waits for. Raises SpecError when ranks wait for each other."""
        made: dict[Result, tuple[int, int]] = {}
        found: list[Turn] = []
        done, before = [0] * len(self.ranks), [-1] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, ops in enumerate(self.ranks):
                while done[rank] < len(ops):
                    op = ops[done[rank]]
                    needed = [made.get(one) for one in deps(self, op)]
                    if None in needed:
                        break
                    sent = tuple(turn for turn, source in filter(None, needed) if source != rank)
                    found.append(Turn(rank, op, before[rank], sent))
                    before[rank] = len(found) - 1
                    made |= dict.fromkeys(results(op), (before[rank], rank))
                    done[rank], moved = done[rank] + 1, True
        waiting = [
            f"rank {rank} at {ops[at]}"
            for rank, (ops, at) in enumerate(zip(self.ranks, done, strict=True))
            if at < len(ops)
        ]
        if waiting:
            raise SpecError(
                f"schedule {self.name} stops: {'; '.join(waiting)}",
                fix="order the passes so that each one's input is made before, see deps in hone/cost/pipeline/table.py",
            )
        return tuple(found)


def results(op: Op) -> list[Result]:
    """What is there when `op` has ended."""
    kinds = {"F": "F", "B": "IW", "I": "I", "W": "W", "S": ""}[op.kind]
    return [Result(kind, op.stage, op.microbatch) for kind in kinds]  # type: ignore[arg-type]


def deps(table: Table, op: Op) -> list[Result]:
    """What must be there before `op` begins. A step waits only for what its own rank did before it."""
    stage, number = op.stage, op.microbatch
    if op.kind == "F":
        return [Result("F", stage - 1, number)] if stage else []
    if op.kind in "BI":
        last = stage == table.stages - 1
        return [Result("F", stage, number), *([] if last else [Result("I", stage + 1, number)])]
    return [Result("I", stage, number)] if op.kind == "W" else []


def receiver(table: Table, op: Op) -> Result | None:
    """Whose input the result of `op` is: F of the next stage, I of the one before; None when nobody's."""
    if op.kind == "F" and op.stage < table.stages - 1:
        return Result("F", op.stage + 1, op.microbatch)
    if op.kind in "BI" and op.stage:
        return Result("I", op.stage - 1, op.microbatch)
    return None


def loop(ranks: int) -> Callable[[int, int], int]:
    """Stage s is on rank s modulo `ranks`."""
    return lambda stage, microbatch: stage % ranks


def vee(ranks: int) -> Callable[[int, int], int]:
    """Two stages a rank: down the ranks and up again, so that the first rank has the first and the last stage."""
    return lambda stage, microbatch: stage if stage < ranks else 2 * ranks - 1 - stage


def frozen(ranks: Sequence[Sequence[Op]]) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(ops) for ops in ranks)
