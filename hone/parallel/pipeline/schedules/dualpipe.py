"""DualPipe: microbatches from both ends at once (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1).

DualPipeV cuts it in half: one set of weights, two stages a rank in a V (github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from hone.base.errors import SpecError
from hone.cost.pipeline.table import Kind, Op, Table, frozen, vee

_Pass = tuple[Kind, bool, int, bool]
"""Kind, way, number, and whether it overlaps with the next pass."""


def dualpipe(ranks: int, microbatches: int) -> Table:
    """Even microbatches enter at the first rank, odd ones at the last: each stage is on two ranks, which add gradients.

    Idle (p/2-1)(F+I-W) at about equal times, below the published (p/2-1)(F&B+B-3W), which takes a forward and a backward
    as one pass, F&B; up to p+1 activations. Raises SpecError for an odd number of ranks or
    microbatches, and for fewer than 2p microbatches.
    """
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise SpecError(
            f"DualPipe of {microbatches} microbatches over {ranks} ranks",
            fix="use an even number of ranks p and an even number of microbatches, at least 2p",
        )
    ops = []
    for rank in range(ranks):
        lower = rank >= ranks // 2
        ops.append(
            [
                Op(kind, ranks - 1 - rank if way != lower else rank, 2 * number + (way != lower), paired=paired)
                for kind, way, number, paired in _passes(ranks // 2, min(rank, ranks - 1 - rank), microbatches // 2)
            ]
        )
    place = lambda stage, microbatch: ranks - 1 - stage if microbatch % 2 else stage  # noqa: E731
    return Table("DualPipe", frozen(ops), ranks, microbatches, place)


def dualpipe_v(ranks: int, microbatches: int) -> Table:
    """Idle (p-1)(F+I-W) of a half stage; up to 2p+1 activations of one.

    Raises SpecError for fewer than 2p microbatches.
    """
    if microbatches < 2 * ranks:
        raise SpecError(
            f"DualPipeV of {microbatches} microbatches over {ranks} ranks",
            fix=f"use at least {2 * ranks} microbatches, or zb_v",
        )
    ops = [
        [
            Op(kind, 2 * ranks - 1 - rank if way else rank, number, paired=paired)
            for kind, way, number, paired in _passes(ranks, rank, microbatches)
        ]
        for rank in range(ranks)
    ]
    return Table("DualPipeV", frozen(ops), 2 * ranks, microbatches, vee(ranks))


def _passes(half: int, rank: int, microbatches: int) -> Iterator[_Pass]:
    """The passes of the rank `rank` steps from the end; way is False of its near stage, True of its far."""
    done: Counter[tuple[str, bool]] = Counter()
    queued: deque[tuple[bool, int]] = deque()
    inner = half - 1 - rank  # ranks between this one and the middle

    def forward(way: bool) -> Iterator[_Pass]:
        yield "F", way, done["F", way], False
        done["F", way] += 1

    def backward(way: bool, split: bool = False) -> Iterator[_Pass]:
        number = done["B", way]
        done["B", way] += 1
        if split:
            queued.append((way, number))
        yield "I" if split else "B", way, number, False

    def weights() -> Iterator[_Pass]:
        if queued:
            yield ("W", *queued.popleft(), False)

    def pair(way: bool) -> Iterator[_Pass]:
        """A forward of `way` beside a backward of the other one."""
        for one in forward(way):
            yield (*one[:3], True)
        yield from backward(not way)

    for _ in range(2 * inner):
        yield from forward(False)
    for _ in range(rank + 1):
        yield from forward(False)
        yield from forward(True)
    for _ in range(inner):
        yield from backward(True, split=True)
        yield from weights()
        yield from forward(True)
    for _ in range(microbatches - 2 * half + rank + 1):  # the steady state: both ways in turn
        yield from pair(False)
        yield from pair(True)
    for _ in range(inner):
        yield from backward(True)
        yield from pair(True)
    for index in range(2 * (rank + 1)):  # the second half of these leaves W for the time of waiting that follows
        yield from backward(index % 2 == 0, split=index > rank)
    for _ in range(inner):
        yield from weights()
        yield from backward(False, split=True)
    while queued:
        yield from weights()
