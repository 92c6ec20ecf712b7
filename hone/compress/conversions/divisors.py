"""LongRoPE's search: divisors of rotary frequencies by evolution, judged by the loss on long calibration sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.structured.importance import each_layer, next_token_loss
from hone.model.rope import Rope
from hone.model.weights.model import ModelSource

Divisors = tuple[float, ...]

_MOST, _STEP = 1.25, 0.01
"""Divisors go up to _MOST x factor, in steps of _STEP, as in the paper."""
_CHANGED = 0.3
"""The chance of each divisor to change in a mutation."""


def usual(factor: float, dim: int, rope: Rope) -> list[Divisors]:
    """The divisors of position interpolation, of a larger base (NTK-aware) and of YaRN, from which the search begins."""
    count = dim // 2
    plain = rope.frequencies(dim)
    yarn = plain / rope.model_copy(update={"scaling": "yarn", "factor": factor}).frequencies(dim)
    larger = [factor ** (index / max(count - 1, 1)) for index in range(count)]
    return [(factor,) * count, tuple(larger), tuple(yarn.tolist())]


def evolve(
    first: Sequence[Divisors],
    factor: float,
    population: int,
    rounds: int,
    seed: int,
    loss: Callable[[Divisors], float],
) -> tuple[Divisors, float, list[float]]:
    """The divisors of least `loss`, that, and those of `first`. They never fall from one frequency to the next slower one.

    Each round keeps the best half, and makes as many of it: by changing some divisors of one, or taking each from one of two. Ding et
    al. 2024, arXiv:2402.13753, section 3.3.
    """
    draw = np.random.default_rng(seed)

    def changed(one: np.ndarray) -> np.ndarray:
        fresh = 1 + _STEP * draw.integers(0, int((_MOST * factor - 1) / _STEP) + 1, len(one))
        near = one * draw.uniform(0.8, 1.25, len(one))
        new = np.where(draw.random(len(one)) < 0.5, fresh, near)
        return np.clip(np.where(draw.random(len(one)) < _CHANGED, new, one), 1.0, _MOST * factor)

    known: dict[Divisors, float] = {}

    def judged(one: Sequence[float]) -> tuple[float, Divisors]:
        key = tuple(float(value) for value in np.maximum.accumulate(np.asarray(one, float)))
        if key not in known:
            known[key] = loss(key)
        return known[key], key

    begun = [judged(one) for one in first]
    alive = sorted(
        [*begun, *(judged(changed(np.array(first[n % len(first)]))) for n in range(population - len(first)))]
    )
    for _ in range(rounds):
        parents = alive[: max(2, len(alive) // 2)]
        made = []
        for number in range(population - len(parents)):
            one, other = (np.array(parents[draw.integers(len(parents))][1]) for _ in range(2))
            made.append(judged(changed(one) if number % 2 == 0 else np.where(draw.random(len(one)) < 0.5, one, other)))
        alive = sorted([*parents, *made])
    best, found = alive[0]
    return found, best, [value for value, _ in begun]


@torch.no_grad()
def search(
    source: ModelSource,
    flow: Flow,
    run: Run,
    ropes: Callable[[Divisors], dict[int, Rope]],
    first: Sequence[Divisors],
    factor: float,
    population: int,
    rounds: int,
    seed: int,
) -> tuple[Divisors, float, list[float]]:
    """As `evolve`, by the loss of `source`, whole in memory, with the `ropes` of its layers on the sequences of `flow`."""
    layers = [layer for _, layer in each_layer(source, flow, run)]
    ends = source.build_ends(flow.device, flow.dtype)

    def loss(divisors: Divisors) -> float:
        for index, rope in ropes(divisors).items():
            layers[index].mixer.spec = layers[index].mixer.spec.model_copy(update={"rope": rope})
        flow.embed(ends)
        for layer in layers:
            flow.through(layer)
        found = next_token_loss(source, flow)
        return found if math.isfinite(found) else math.inf

    return evolve(first, factor, population, rounds, seed, loss)
