"""A quantum circuit that searches for a choice, simulated exactly on its state vector: QAOA, Farhi et al. 2014, arXiv:1411.4028.

It is here to be compared at equal evaluations. A simulation takes 2^n numbers for n items of two options, so that searching all of
them directly is never slower; nothing is claimed of hardware.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hone.solvers.pairwise.problem import Pairwise

MOST_ITEMS = 20
"""Of two options each: the state has 2^n complex numbers."""


def qaoa(problem: Pairwise, evaluations: int, depth: int = 3, seed: int = 0) -> list[int] | None:
    """The best choice that fits among those drawn from the circuit of `depth` layers after its angles were optimized.

    Every use of the circuit, to optimize an angle or to draw a choice, is one of `evaluations`. A choice over the budget has a penalty
    in the circuit, of more than all losses together for the smallest excess. Raises ValueError for an item without two options, and for more than
    `MOST_ITEMS` items.
    """
    from scipy.optimize import minimize

    count = len(problem)
    if count > MOST_ITEMS or any(len(sizes) != 2 for sizes in problem.sizes):
        raise ValueError(f"a circuit is simulated of at most {MOST_ITEMS} items with two options each")
    if problem.smallest() is None:
        return None
    energy, fits = energies(problem)
    scale = max(float(np.ptp(energy)), 1e-30)
    phases = (energy - energy.min()) / scale
    tuning = evaluations // 2

    def mean(angles: NDArray[np.float64]) -> float:
        problem.evaluations += 1
        return float(probabilities(phases, angles) @ phases)

    start = np.concatenate([np.linspace(0.2, 1.0, depth) * math.pi, np.linspace(1.0, 0.2, depth) * math.pi / 4])
    tuned = minimize(mean, start, method="COBYLA", options={"maxiter": max(tuning, 2 * depth + 2)})
    drawn = probabilities(phases, tuned.x)
    left = max(evaluations - int(tuned.nfev), 1)
    problem.evaluations += left
    found = np.random.default_rng(seed).choice(len(drawn), left, p=drawn / drawn.sum())
    fitting = found[fits[found]]
    if not len(fitting):
        return problem.smallest()
    best = int(fitting[np.argmin(energy[fitting])])
    return [best >> item & 1 for item in range(count)]


def energies(problem: Pairwise) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Loss of each of the 2^n choices (bit i: option of item i) with the penalty of those over the budget, and which fit."""
    count = len(problem)
    states = np.arange(2**count)
    bits = [states >> item & 1 for item in range(count)]
    energy, size = np.zeros(len(states)), np.zeros(len(states))
    for item in range(count):
        energy += np.asarray(problem.losses[item], float)[bits[item]]
        size += np.asarray(problem.sizes[item], float)[bits[item]]
    for (one, other), table in problem.pairs.items():
        energy += np.asarray(table, float)[bits[one], bits[other]]
    fits = size <= problem.budget
    over = np.maximum(size - problem.budget, 0.0)
    spread = float(np.ptp(energy[fits])) if fits.any() else 1.0
    return energy + np.where(fits, 0.0, spread * (0.1 + over / max(over.max(), 1.0))), fits


def probabilities(phases: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each state after the circuit: from all states alike, layers of a phase by the cost and a rotation of every qubit."""
    depth, count = len(angles) // 2, int(math.log2(len(phases)))
    state = np.full(len(phases), 1 / math.sqrt(len(phases)), complex)
    for gamma, beta in zip(angles[:depth], angles[depth:], strict=True):
        state = state * np.exp(-1j * gamma * phases)
        cosine, sine = math.cos(beta), -1j * math.sin(beta)
        for qubit in range(count):
            pairs = state.reshape(-1, 2, 2**qubit)
            state = np.stack(
                [cosine * pairs[:, 0] + sine * pairs[:, 1], cosine * pairs[:, 1] + sine * pairs[:, 0]], 1
            ).reshape(-1)
    return np.abs(state) ** 2
