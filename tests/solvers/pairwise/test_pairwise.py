"""Pairwise choices: exact against every choice, searches against exact, and the circuit against matrices of its gates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.solvers.knapsack import choose
from hone.solvers.pairwise.problem import Pairwise
from hone.solvers.pairwise.qaoa import energies, probabilities, qaoa
from hone.solvers.pairwise.solvers import anneal, at_random, exact, greedy


def drawn(seed: int, items: int, options: int, tight: float = 0.5, coupled: float = 1.0) -> Pairwise:
    """Losses that fall with bytes, and pair terms of either sign."""
    generator = np.random.default_rng(seed)
    sizes = [[int(one) for one in np.sort(generator.integers(1, 100, options))] for _ in range(items)]
    losses = [sorted(generator.exponential(1.0, options), reverse=True) for _ in range(items)]
    pairs = {
        (i, j): coupled * generator.normal(0, 0.3, (options, options))
        for i, j in itertools.combinations(range(items), 2)
        if generator.random() < 0.6
    }
    least, most = sum(min(s) for s in sizes), sum(max(s) for s in sizes)
    return Pairwise(sizes, losses, pairs, int(least + tight * (most - least)))


def best_of_all(problem: Pairwise) -> float:
    choices = itertools.product(*(range(len(sizes)) for sizes in problem.sizes))
    return min(problem.loss(one) for one in choices if problem.size(one) <= problem.budget)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1))
def test_exact_is_the_best_of_all_choices(seed, items, options, tight):
    problem = drawn(seed, items, options, tight)
    found = exact(problem)
    assert found is not None and problem.size(found.choice) <= problem.budget
    best = best_of_all(problem)
    assert problem.loss(found.choice) == pytest.approx(best, abs=1e-6)
    assert found.bound <= best + 1e-6


def test_without_pairs_it_is_the_knapsack():
    problem = drawn(3, 8, 4, coupled=0.0)
    found, knapsack = exact(problem), choose(problem.sizes, problem.losses, problem.budget)
    assert found is not None and knapsack is not None
    assert problem.loss(found.choice) == pytest.approx(problem.loss(knapsack), abs=1e-9)


@pytest.mark.parametrize("search", [greedy, lambda one: at_random(one, 300), lambda one: anneal(one, 300)])
@pytest.mark.parametrize("tight", [0.0, 0.4, 1.0])
def test_searches_keep_the_budget_and_are_no_better_than_exact(search, tight):
    problem = drawn(5, 7, 3, tight)
    found, best = search(problem), exact(problem)
    assert found is not None and best is not None and problem.size(found) <= problem.budget
    assert problem.loss(found) >= problem.loss(best.choice) - 1e-6


def test_annealing_comes_near_the_best_and_keeps_its_evaluations():
    worse = []
    for seed in range(8):
        problem = drawn(seed, 10, 4)
        best = exact(problem)
        assert best is not None
        problem.evaluations = 0
        found = anneal(problem, 3000, seed)
        assert found is not None and problem.evaluations <= 3002
        start = problem.smallest()
        assert start is not None
        gap = problem.loss(found) - problem.loss(best.choice)
        worse.append(gap / (problem.loss(start) - problem.loss(best.choice)))
    assert np.mean(worse) < 0.03


def test_a_change_is_the_difference_of_losses():
    problem = drawn(11, 6, 3)
    choice = [0, 1, 2, 0, 1, 2]
    for item, option in itertools.product(range(6), range(3)):
        changed = [*choice[:item], option, *choice[item + 1 :]]
        assert problem.change(choice, item, option) == pytest.approx(problem.loss(changed) - problem.loss(choice))


def test_nothing_fits_a_budget_below_the_smallest():
    problem = drawn(1, 4, 2)
    problem.budget = sum(min(sizes) for sizes in problem.sizes) - 1
    assert (
        exact(problem) is greedy(problem) is anneal(problem, 10) is at_random(problem, 10) is qaoa(problem, 50) is None
    )


def test_energies_are_the_losses_of_what_fits_and_more_of_what_does_not():
    problem = drawn(2, 6, 2)
    energy, fits = energies(problem)
    for state in range(64):
        choice = [state >> item & 1 for item in range(6)]
        assert fits[state] == (problem.size(choice) <= problem.budget)
        if fits[state]:
            assert energy[state] == pytest.approx(problem.loss(choice))
        else:
            assert energy[state] > problem.loss(choice)


def test_the_circuit_is_the_product_of_its_gates():
    """exp(-i beta sum X) exp(-i gamma C) of dense matrices, for 3 qubits and two layers."""
    phases = np.random.default_rng(0).random(8)
    angles = np.array([0.7, 1.9, 0.3, 0.5])
    flip = np.array([[0, 1], [1, 0]])
    mixer = sum(np.kron(np.kron(np.eye(2**left), flip), np.eye(2**right)) for left, right in [(0, 2), (1, 1), (2, 0)])
    state = np.full(8, 1 / math.sqrt(8), complex)
    for gamma, beta in ((0.7, 0.3), (1.9, 0.5)):
        state = scipy.linalg.expm(-1j * beta * mixer) @ (np.exp(-1j * gamma * phases) * state)
    np.testing.assert_allclose(probabilities(phases, angles), np.abs(state) ** 2, atol=1e-12)


def test_the_circuit_finds_better_choices_than_as_many_random_ones():
    gaps: dict[str, list[float]] = {"circuit": [], "random": []}
    for seed in range(5):
        problem = drawn(seed, 10, 2)
        best = exact(problem)
        assert best is not None
        generator = np.random.default_rng(seed)
        energy, fits = energies(problem)
        found = qaoa(problem, 120, seed=seed)
        assert found is not None and problem.size(found) <= problem.budget
        uniform = generator.choice(len(energy), 60)  # what the circuit draws after half of its evaluations
        gaps["circuit"].append(problem.loss(found) - problem.loss(best.choice))
        gaps["random"].append(float(energy[uniform].min()) - problem.loss(best.choice))
        assert fits.any() and gaps["circuit"][-1] >= -1e-9
    assert np.mean(gaps["circuit"]) < np.mean(gaps["random"])


def test_the_circuit_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="two options"):
        qaoa(drawn(0, 3, 3), 10)
