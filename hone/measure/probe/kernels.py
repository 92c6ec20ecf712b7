"""The loops that a probe of the host times, compiled by numba: chains of loads, STREAM's kernels, a chain of register operations.

None holds the interpreter's lock, so that Python threads run them side by side.
"""

from __future__ import annotations

from typing import Any

from numba import njit, uint64

from hone.measure.compilers import compile_without_collections

compile_without_collections()
_compiled: Any = njit(nogil=True, boundscheck=False, cache=True)

WORDS = 8
"""Words of 8 bytes in a node of a chain: one cache line of 64 bytes."""


@_compiled
def chase(words: Any, start: Any, steps: int) -> Any:
    """Follows the chain in `words` (uint64, in which a node holds the place of the next) for `steps` loads; returns the last place.

    Places are unsigned: numba would test signed ones for being negative between one load and the next.
    """
    at = uint64(start)
    for _ in range(steps):
        at = words[at]
    return at


@_compiled
def link(words: Any, order: Any) -> None:
    """Makes one cycle of the nodes of `words` in the order `order` (uint64: a permutation of the node numbers)."""
    count = len(order)
    for place in range(count):
        following = order[place + 1] if place + 1 < count else order[0]
        words[order[place] * uint64(WORDS)] = following * uint64(WORDS)


@_compiled
def register_chain(seed: Any, rounds: int) -> Any:
    """`rounds` rounds of a xorshift generator (Marsaglia 2003), six dependent register operations each; returns the state."""
    state = seed
    for _ in range(rounds):
        state ^= state << uint64(13)
        state ^= state >> uint64(7)
        state ^= state << uint64(17)
    return state


@_compiled
def read(source: Any, times: int) -> Any:
    """Adds all of `source` (int64) `times` times; returns the sum."""
    total = 0
    for turn in range(times):
        part = turn
        for place in range(len(source)):
            part += source[place]
        total ^= part
    return total


@_compiled
def copy(target: Any, source: Any) -> None:
    """target = source, over float64."""
    for place in range(len(target)):
        target[place] = source[place]


@_compiled
def triad(target: Any, first: Any, second: Any, factor: float) -> None:
    """target = first + factor * second, over float64."""
    for place in range(len(target)):
        target[place] = first[place] + factor * second[place]


@_compiled
def triad_until(target: Any, first: Any, second: Any, factor: float, stop: Any) -> int:
    """Runs `triad` until another thread sets stop[0]; returns how often it ran."""
    turns = 0
    while stop[0] == 0:
        for place in range(len(target)):
            target[place] = first[place] + factor * second[place]
        turns += 1
    return turns
