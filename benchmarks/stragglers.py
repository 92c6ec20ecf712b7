"""When workers end their steps that wait for each other as a consistency rule says: what a slow one costs the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def ends(
    step_s: Sequence[Sequence[float]],
    staleness: float,
    *,
    sync_every: int = 0,
    peers: Callable[[int, int], Sequence[int]] | None = None,
) -> list[list[float]]:
    """Seconds after the start at which each worker has ended each of its steps, [workers][steps] as `step_s`, its own seconds for them.

    Step c (from 0) of a worker begins when its step before has ended, and those of all workers up to step c - 1 - `staleness`
    (Ho et al. 2013): 0 is bsp and ddp, infinity asp, local_sgd, gossip and ad_psgd. After every `sync_every` steps (0: not) all
    wait for all. `peers(c, worker)` are the workers whose step c - 1 must have ended before its own step c ends, such as gossip's
    neighbours, whose weights come while it computes.
    """
    workers, steps = range(len(step_s)), len(step_s[0])
    found: list[list[float]] = [[] for _ in workers]
    for step in range(steps):
        met = sync_every > 0 and step > 0 and step % sync_every == 0
        waits = step if met else step - staleness
        behind = max((found[one][int(waits) - 1] for one in workers), default=0.0) if waits >= 1 else 0.0
        before = [one[-1] if one else 0.0 for one in found]
        for worker in workers:
            near = [before[one] for one in peers(step, worker)] if peers is not None else []
            found[worker].append(max([max(before[worker], behind) + step_s[worker][step], *near]))
    return found
