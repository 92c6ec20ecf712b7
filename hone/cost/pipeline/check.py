"""The validator of schedules: nothing waits for ever, every pass is there once, memory and weight versions are bounded."""

from __future__ import annotations

from collections import Counter

from hone.base.errors import SpecError
from hone.cost.pipeline.simulate import simulate
from hone.cost.pipeline.table import Result, Table, results


def validate(table: Table, *, activations: float | None = None, versions: int | None = None) -> None:
    """Raises SpecError where the table is no schedule, or holds more than `activations` or `versions` on a rank.

    `activations` counts microbatches of one stage, `versions` copies of a stage's weights.
    """
    made: Counter[Result] = Counter()
    for rank, ops in enumerate(table.ranks):
        for op in ops:
            if op.kind != "S" and table.place(op.stage, op.microbatch) != rank:
                _refuse(table, f"{op} is on rank {rank} instead of {table.place(op.stage, op.microbatch)}")
            made.update(results(op))
    for number in range(table.microbatches):
        for stage in range(table.stages):
            for kind in ("F", "I", "W") if table.trains else ("F",):
                times = made.pop(Result(kind, stage, number), 0)  # type: ignore[arg-type]
                if times != 1:
                    _refuse(table, f"{kind} of stage {stage} of microbatch {number} is there {times} times")
    if made:
        _refuse(table, f"{next(iter(made))} belongs to no stage or microbatch")
    peaks = simulate(table).peaks
    if activations is not None and max(peaks) > activations:
        _refuse(table, f"rank {peaks.index(max(peaks))} holds {max(peaks):g} activations, {activations:g} are allowed")
    alive = alive_versions(table)
    if versions is not None and max(alive) > versions:
        _refuse(table, f"rank {alive.index(max(alive))} holds {max(alive)} versions of weights, {versions} are allowed")


def alive_versions(table: Table) -> list[int]:
    """The most versions of a stage's weights that each rank holds at once.

    Raises SpecError when a pass reads weights that are not made yet, or a backward other ones than its forward.
    """
    found = []
    for ops in table.ranks:
        last = {(op.stage, op.version): index for index, op in enumerate(ops)}
        current: Counter[int] = Counter()
        read: dict[tuple[int, int], int] = {}
        most = 1
        for index, op in enumerate(ops):
            if op.kind == "S":
                if op.version != current[op.stage] + 1:
                    _refuse(table, f"{op} follows version {current[op.stage]}")
                current[op.stage] = op.version
            elif op.version > current[op.stage]:
                _refuse(table, f"{op} reads weights that are not made yet")
            elif op.version != read.setdefault((op.stage, op.microbatch), op.version):
                _refuse(table, f"{op} reads other weights than its forward")
            needed = {version for (stage, version), end in last.items() if stage == op.stage and end > index}
            most = max(most, len({v for v in needed if v <= current[op.stage]} | {current[op.stage]}))
        found.append(most)
    return found


def staleness(table: Table) -> int:
    """The most steps taken on a stage between the weights that a gradient was computed with and the step that uses it."""
    most = 0
    for ops in table.ranks:
        waiting: dict[int, list[int]] = {}
        for op in ops:
            if op.kind in "BI":
                waiting.setdefault(op.stage, []).append(op.version)
            elif op.kind == "S":
                most = max([most, *(op.version - 1 - version for version in waiting.pop(op.stage, []))])
    return most


def _refuse(table: Table, what: str) -> None:
    raise SpecError(f"schedule {table.name}: {what}", fix="correct the function that makes the table")
