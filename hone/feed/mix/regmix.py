"""RegMix mixture: fits the loss as a function of the weights on small proxy runs, then averages the best simulated weights."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.durable import input_file
from hone.base.errors import MissingExtra, SpecError
from hone.feed.mix.base import Chosen, Mixture, Source, by_source, shares, sizes
from hone.feed.mix.simplex import fill

_STRENGTHS = np.geomspace(0.1, 5.0, 32)
_RIDGES = tuple(10.0**power for power in range(-6, 4))
_FOLDS = 5
_FEWEST_RUNS = 8
_LOG_FLOOR = 1e-4


class Runs(NamedTuple):
    """Proxy runs: `weights` float64 [runs, sources], `loss` float64 [runs], the sources' names in column order."""

    weights: np.ndarray
    loss: np.ndarray
    names: list[str]


class RegMix(Mixture):
    """Fits a regression from weights to loss over proxy runs; the mean of the best simulated mixtures. Liu et al. 2024, arXiv:2407.01492.

    Mixtures are drawn from Dirichlet distributions around the square roots of the sources' sizes, as the
    paper drew its runs; the best of them, by predicted loss and under the caps on epochs, are averaged.
    """

    paper: ClassVar[str] = "arXiv:2407.01492"
    mixtures: str = Field(description="CSV file of the runs' weights: an index column, then one column per source.")
    losses: str = Field(description="CSV file of their losses: an index column, then one column per validation set.")
    target: str = Field(
        "", description="Loss column to minimize, or an unambiguous part of its name; empty: the mean of all."
    )
    regressor: Literal["boosting", "ridge"] = Field(
        "boosting", description="Boosted trees, or ridge regression on powers and logarithms (for few runs)."
    )
    num_simulated: int = Field(100_000, ge=100, description="Mixtures to predict.")
    num_best: int = Field(128, ge=1, description="Best of them to average.")
    seed: int = Field(0, ge=0, description="Seed of the simulated mixtures.")

    def files(self) -> dict[str, Path]:
        return {f"mixture.{name}": Path(getattr(self, name)).expanduser() for name in ("mixtures", "losses")}

    def weigh(self, sources: Sequence[Source], budget: float) -> Chosen:
        """The average of the best simulated mixtures, all within the caps."""
        caps = self.caps(sources, budget)
        runs = read_runs(self.mixtures, self.losses, self.target)
        columns = by_source({name: place for place, name in enumerate(runs.names)}, sources, self.mixtures)
        weights = runs.weights[:, columns]
        weights = weights / weights.sum(1, keepdims=True)
        predict = fit(weights, runs.loss, self.regressor)
        agreement = cross_validate(weights, runs.loss, self.regressor)
        chosen = self._best(predict, sources, caps)
        free = chosen if (caps >= 1).all() else self._best(predict, sources, np.ones(len(sources)))
        notes = {
            "runs": len(runs.loss),
            "best_run_loss": float(runs.loss.min()),
            "predicted_loss": float(predict(chosen[None])[0]),
            "predicted_loss_by_size": float(predict(fill(sizes(sources), caps)[None])[0]),
            "rank_correlation": agreement,
        }
        said = (
            f"mean of the best {self.num_best} of {self.num_simulated} simulated; predicted loss {notes['predicted_loss']:.4f}, "
            f"in proportion to sizes {notes['predicted_loss_by_size']:.4f}"
        )
        varies = (weights.std(0) > 0) & (runs.loss.std() > 0)
        worth = [
            -float(np.corrcoef(column, runs.loss)[0, 1]) if varied else 0.0 for column, varied in zip(weights.T, varies)
        ]
        return Chosen(shares(sources, budget, free, chosen, caps, worth, [said] * len(sources)), notes)

    def _best(
        self, predict: Callable[[np.ndarray], np.ndarray], sources: Sequence[Source], caps: np.ndarray
    ) -> np.ndarray:
        """Mean of the simulated mixtures with the lowest predicted loss under `caps`, float64 [sources]."""
        drawn = simulate([source.size for source in sources], caps, self.num_simulated, self.seed)
        best = np.argsort(predict(drawn), kind="stable")[: self.num_best]
        return drawn[best].mean(0)


def simulate(tokens: Sequence[int], caps: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` mixtures under `caps`, float64 [count, n]: Dirichlet draws, with weight above a cap moved to other sources."""
    prior = np.sqrt(np.asarray(tokens, float))
    prior /= prior.sum()
    draw = np.random.Generator(np.random.PCG64(seed))
    parts = [
        draw.dirichlet(np.maximum(prior * strength, 1e-3), size)
        for strength, size in zip(_STRENGTHS, np.diff(np.linspace(0, count, len(_STRENGTHS) + 1).astype(int)))
    ]
    drawn = np.minimum(np.concatenate(parts), caps)
    room = caps - drawn
    left = np.maximum(1 - drawn.sum(1, keepdims=True), 0)
    return drawn + left * room / np.maximum(room.sum(1, keepdims=True), 1e-300)


def fit(weights: np.ndarray, loss: np.ndarray, regressor: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function from weights [m, n] to predicted losses [m], fitted to runs (float64 [r, n] and [r]) by scikit-learn.

    'boosting' is histogram gradient boosting of 300 trees with 15 leaves; 'ridge' chooses its regularization by leave-one-out
    cross-validation. Deterministic on any number of cores. Raises MissingExtra without scikit-learn.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, StandardScaler
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise MissingExtra.of("regmix", "scikit-learn", "data") from None
    if regressor == "boosting":
        smallest = max(1, min(20, len(loss) // 8))
        model = HistGradientBoostingRegressor(
            max_iter=300, max_leaf_nodes=15, min_samples_leaf=smallest, early_stopping=False
        )
    else:
        model = make_pipeline(FunctionTransformer(_features), StandardScaler(), RidgeCV(_RIDGES))
    with threadpool_limits(1):  # sums over threads would round differently
        model.fit(weights, loss)
    return model.predict


def cross_validate(weights: np.ndarray, loss: np.ndarray, regressor: str) -> float:
    """Spearman's rank correlation between losses and their cross-validated predictions."""
    predicted = np.empty(len(loss))
    for fold in range(_FOLDS):
        held = np.arange(len(loss)) % _FOLDS == fold
        predicted[held] = fit(weights[~held], loss[~held], regressor)(weights[held])
    return spearman(predicted, loss)


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation, ties with their mean rank; 0 when one of them is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic) if np.ptp(one) > 0 and np.ptp(other) > 0 else 0.0


def read_runs(mixtures: Path | str, losses: Path | str, target: str = "") -> Runs:
    """The runs of two CSV files, joined by their index column. Raises SpecError naming the invalid file."""
    names, weights = _table(input_file(mixtures, "mixture.mixtures"))
    sets, values = _table(input_file(losses, "mixture.losses"))
    both = [index for index in weights if index in values]
    if len(both) < _FEWEST_RUNS:
        raise SpecError(
            f"{mixtures} ({len(weights)} runs) and {losses} ({len(values)}) have {len(both)} runs in common",
            fix=f"give at least {_FEWEST_RUNS} runs, with the same value of the index column in both files",
        )
    chosen = [place for place, name in enumerate(sets) if target in name]
    exact = [place for place, name in enumerate(sets) if name == target]
    if not chosen or (target and len(exact or chosen) != 1):
        raise SpecError(
            f"mixture.target = '{target}' names {len(chosen)} columns of {losses}", fix=f"take one of {', '.join(sets)}"
        )
    loss = np.array([values[index] for index in both])[:, exact or chosen].mean(1)
    return Runs(np.array([weights[index] for index in both]), loss, _short(names))


def _short(names: list[str]) -> list[str]:
    """Column names without the '_'-separated words that all begin with, often the name of the whole corpus."""
    parts = [name.split("_") for name in names]
    shared = 0
    while len(names) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["_".join(part[shared:]) for part in parts]


def _features(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, x**2, np.log(np.maximum(x, 0) + _LOG_FLOOR), np.sqrt(np.maximum(x, 0))])


def _table(path: Path) -> tuple[list[str], dict[str, list[float]]]:
    """(column names, numbers by index) of a CSV file whose first column is the index."""
    try:
        with open(path, newline="", encoding="utf8") as file:
            header, *rows = [row for row in csv.reader(file) if row]
        table = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    except (ValueError, OSError, csv.Error) as error:
        raise SpecError(
            f"{path} is not a table of numbers: {error}", fix="write a header, then an index and numbers in every row"
        ) from None
    widths = {len(row) for row in table.values()}
    if widths != {len(header) - 1} or len(table) != len(rows) or not np.isfinite([*table.values()]).all():
        raise SpecError(
            f"{path} has rows of other lengths than its header, a repeated index, or values that are not finite",
            fix="write a header, then an index and finite numbers in every row",
        )
    return header[1:], table
