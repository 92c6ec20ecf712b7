"""Solvers of a pairwise choice: exact by branch and bound, and three that search for a good one.

All return the place of an option for each item, or None where nothing fits the budget.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hone.solvers.pairwise.problem import Pairwise

HOTTEST, COLDEST = 1.0, 1e-3
"""Temperatures of annealing at its begin and end, times the mean size of a change of the loss."""
REJECTED = 10
"""Moves of annealing that change nothing or do not fit, for each that is evaluated, after which it ends."""


class Exact(NamedTuple):
    """A choice and the lower bound of the loss that was proven: equal to its loss where it is the best."""

    choice: list[int]
    bound: float


def exact(problem: Pairwise, seconds: float = 60.0) -> Exact | None:
    """The best choice by HiGHS (branch and bound), or the best that `seconds` found, with the bound then reached.

    The product of two options' variables is a variable of its own, by the local polytope (Adams and Sherali 1986): the sums over either
    option equal the other's variable, so that it need not be an integer.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    if problem.smallest() is None:
        return None
    firsts, width = [], 0
    for sizes in problem.sizes:
        firsts.append(width)
        width += len(sizes)
    singles = width
    cost = [float(loss) for losses in problem.losses for loss in losses]
    rows: list[dict[int, float]] = [{firsts[i] + at: 1.0 for at in range(len(s))} for i, s in enumerate(problem.sizes)]
    right = [1.0] * len(rows)
    for (one, other), table in problem.pairs.items():
        many, more = table.shape
        places = width + np.arange(many * more).reshape(many, more)
        width += many * more
        cost += [float(value) for value in np.asarray(table).ravel()]
        rows += [{firsts[one] + a: -1.0, **dict.fromkeys(map(int, places[a]), 1.0)} for a in range(many)]
        rows += [{firsts[other] + b: -1.0, **dict.fromkeys(map(int, places[:, b]), 1.0)} for b in range(more)]
        right += [0.0] * (many + more)
    at = [(row, column, value) for row, entries in enumerate(rows) for column, value in entries.items()]
    equal = csr_matrix(([v for _, _, v in at], ([r for r, _, _ in at], [c for _, c, _ in at])), (len(rows), width))
    bytes_of = np.zeros(width)
    bytes_of[:singles] = [size for sizes in problem.sizes for size in sizes]
    unit = max(problem.budget, 1)  # bytes as shares of the budget, which keeps HiGHS's tolerances meaningful
    found = milp(
        np.array(cost),
        constraints=[
            LinearConstraint(equal, right, right),
            LinearConstraint(bytes_of[None] / unit, -np.inf, problem.budget / unit),
        ],
        integrality=np.concatenate([np.ones(singles), np.zeros(width - singles)]),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    choice = [int(np.argmax(found.x[first : first + len(s)])) for first, s in zip(firsts, problem.sizes, strict=True)]
    return Exact(choice, float(found.mip_dual_bound)) if problem.size(choice) <= problem.budget else None


def greedy(problem: Pairwise) -> list[int] | None:
    """From the smallest options on, always the change that lowers the loss most a byte and still fits, until none does."""
    choice = problem.smallest()
    if choice is None:
        return None
    left = problem.budget - problem.size(choice)
    while True:
        best, pick = 0.0, None
        for item, sizes in enumerate(problem.sizes):
            for option, size in enumerate(sizes):
                more = size - sizes[choice[item]]
                if option == choice[item] or more > left:
                    continue
                gain = -problem.change(choice, item, option)
                if gain > 1e-15 and (worth := gain / max(more, 1e-9)) > best:
                    best, pick = worth, (item, option, more)
        if pick is None:
            return choice
        item, option, more = pick
        choice[item], left = option, left - more


def at_random(problem: Pairwise, evaluations: int, seed: int = 0) -> list[int] | None:
    """The best of as many random choices that fit, each filled up in random order from the smallest options."""
    start, generator = problem.smallest(), np.random.default_rng(seed)
    if start is None:
        return None
    best, least = start, problem.loss(start)
    for _ in range(evaluations - 1):
        choice, left = list(start), problem.budget - problem.size(start)
        for item in generator.permutation(len(problem)):
            sizes = problem.sizes[item]
            fitting = [at for at, size in enumerate(sizes) if size - sizes[choice[item]] <= left]
            option = int(generator.choice(fitting))
            left -= sizes[option] - sizes[choice[item]]
            choice[item] = option
        loss = problem.loss(choice)
        if loss < least:
            best, least = choice, loss
    return best


def anneal(problem: Pairwise, evaluations: int, seed: int = 0) -> list[int] | None:
    """Simulated annealing (Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671) over choices that fit the budget.

    A move gives an item another option; where that does not fit, another item gets a smaller one in return. Temperatures fall
    geometrically from `HOTTEST` to `COLDEST` mean changes. The best choice that was seen is returned. It also ends after `REJECTED`
    moves for each of `evaluations` that change nothing or do not fit.
    """
    choice, generator = problem.smallest(), np.random.default_rng(seed)
    if choice is None:
        return None
    loss, left = problem.loss(choice), problem.budget - problem.size(choice)
    best, least, scale, seen = list(choice), loss, 0.0, 0
    stop = problem.evaluations + evaluations - 1
    while problem.evaluations < stop:
        done = 1 - (stop - problem.evaluations) / max(evaluations, 1)
        item = int(generator.integers(len(problem)))
        option = int(generator.integers(len(problem.sizes[item])))
        if option == choice[item]:
            seen += 1
            if seen > REJECTED * evaluations:  # every item has one option
                break
            continue
        moves = [(item, option)]
        more = problem.sizes[item][option] - problem.sizes[item][choice[item]]
        if more > left:
            other = int(generator.integers(len(problem)))
            lower = int(generator.integers(len(problem.sizes[other])))
            more += problem.sizes[other][lower] - problem.sizes[other][choice[other]]
            if other == item or more > left:
                seen += 1
                if seen > REJECTED * evaluations:
                    break
                continue
            moves.append((other, lower))
        gain, before = 0.0, [choice[one] for one, _ in moves]
        for one, to in moves:
            gain += problem.change(choice, one, to)
            choice[one] = to
        scale = scale or abs(gain)
        scale += (abs(gain) - scale) / 50  # of the last fifty or so
        heat = max(scale, 1e-30) * HOTTEST * (COLDEST / HOTTEST) ** done
        if gain <= 0 or generator.random() < math.exp(-gain / heat):
            loss, left = loss + gain, left - more
            if loss < least:
                best, least = list(choice), loss
        else:
            for (one, _), back in zip(moves, before, strict=True):
                choice[one] = back
    return best
