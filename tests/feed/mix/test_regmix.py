"""RegMix: the published proxy runs predict the published larger ones, and the mixture found is a good one."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from hone.base.errors import SpecError
from hone.feed import MIXTURES
from hone.feed.mix.base import Source
from hone.feed.mix.regmix import cross_validate, fit, read_runs, simulate, spearman


@pytest.fixture(scope="module")
def published(shared_data):
    folder = shared_data / "mixture" / "regmix"
    if not folder.is_dir():
        pytest.skip("no published RegMix runs")
    return folder


@pytest.mark.parametrize(("size", "least"), [("1m", 0.98), ("60m", 0.975), ("1B", 0.95)])
def test_small_runs_rank_larger_ones(published, size, least):
    known = read_runs(published / "train_mixture_1m.csv", published / "train_pile_loss_1m.csv", "pile_cc")
    asked = read_runs(published / f"test_mixture_{size}.csv", published / f"test_pile_loss_{size}.csv", "pile_cc")
    assert known.names == asked.names and len(known.loss) == 512
    scaled = [runs.weights / runs.weights.sum(1, keepdims=True) for runs in (known, asked)]
    assert spearman(fit(scaled[0], known.loss, "boosting")(scaled[1]), asked.loss) >= least


def test_ridge_does_for_few_runs(published):
    known = read_runs(published / "train_mixture_1m.csv", published / "train_pile_loss_1m.csv", "pile_cc")
    asked = read_runs(published / "test_mixture_1m.csv", published / "test_pile_loss_1m.csv", "pile_cc")
    assert spearman(fit(known.weights[:128], known.loss[:128], "ridge")(asked.weights), asked.loss) >= 0.97


def test_the_published_runs_ask_for_web_text(published):
    mixture = MIXTURES.read(
        {
            "kind": "regmix",
            "mixtures": str(published / "train_mixture_1m.csv"),
            "losses": str(published / "train_pile_loss_1m.csv"),
            "target": "pile_cc",
            "num_simulated": 4000,
            "num_best": 32,
        }
    )
    names = read_runs(mixture.mixtures, mixture.losses, "pile_cc").names
    sources = [Source(name, 1_000_000) for name in reversed(names)]
    chosen = mixture.weigh(sources, 2_000_000)
    assert sum(chosen.weights.values()) == pytest.approx(1)
    assert max(chosen.weights, key=chosen.weights.get) == "pile_cc"  # what the paper found for the loss on web text
    assert chosen.notes["rank_correlation"] > 0.95
    assert chosen.notes["predicted_loss"] < chosen.notes["predicted_loss_by_size"]
    capped = mixture.model_copy(update={"max_epochs": 1.0, "regressor": "ridge"}).weigh(sources, 4_000_000)
    assert capped.weights["pile_cc"] <= 0.25 + 1e-9 and all(share.epochs <= 1 + 1e-9 for share in capped.shares)


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.fixture
def synthetic(tmp_path):
    """Runs whose loss is lowest at (.6, .3, .1)."""
    draw = np.random.default_rng(0)
    weights = draw.dirichlet(np.ones(3), 200)
    loss = 3 + ((weights - np.array([0.6, 0.3, 0.1])) ** 2).sum(1)
    mixtures = write(tmp_path / "m.csv", ["index", "t_a", "t_b", "t_c"], [[n, *row] for n, row in enumerate(weights)])
    losses = write(tmp_path / "l.csv", ["index", "one", "two"], [[n, v, -v] for n, v in enumerate(loss)][::-1])
    return {"kind": "regmix", "mixtures": mixtures, "losses": losses, "target": "one", "num_simulated": 20_000}


@pytest.mark.slow
@pytest.mark.parametrize("regressor", ["boosting", "ridge"])
def test_a_known_optimum_is_found(synthetic, regressor):
    sources = [Source(name, 10_000) for name in "abc"]
    mixture = MIXTURES.read({**synthetic, "regressor": regressor})
    chosen = mixture.weigh(sources, 10_000)
    np.testing.assert_allclose(list(chosen.weights.values()), [0.6, 0.3, 0.1], atol=0.06)
    assert chosen == mixture.weigh(sources, 10_000)
    capped = MIXTURES.read({**synthetic, "max_epochs": 0.5}).weigh(sources, 10_000)
    assert max(capped.weights.values()) <= 0.5 + 1e-9


def test_what_does_not_fit_is_named(synthetic, tmp_path):
    with pytest.raises(SpecError, match=r"does not name d and names c, which are not in the data"):
        MIXTURES.read(synthetic).weigh([Source(name, 100) for name in "abd"], 100)
    with pytest.raises(SpecError, match="names 0 columns"):
        read_runs(synthetic["mixtures"], synthetic["losses"], "three")
    with pytest.raises(SpecError, match="names 2 columns"):
        read_runs(synthetic["mixtures"], synthetic["losses"], "o")
    assert read_runs(synthetic["mixtures"], synthetic["losses"]).loss == pytest.approx(np.zeros(200))
    with pytest.raises(SpecError, match="no file"):
        read_runs(tmp_path / "none.csv", synthetic["losses"])
    few = write(tmp_path / "few.csv", ["index", "one"], [["900", 1.0], ["0", 2.0]])
    with pytest.raises(SpecError, match="1 runs in common"):
        read_runs(synthetic["mixtures"], few)
    for rows in ([["0", "x"]], [["0", 1.0, 2.0]], [["0", 1.0], ["0", 2.0]], [["0", "nan"]], []):
        with pytest.raises(SpecError, match=r"is not a table|has rows of other"):
            read_runs(synthetic["mixtures"], write(tmp_path / "bad.csv", ["index", "one"], rows))


def test_simulated_mixtures_keep_the_caps():
    caps = np.array([0.2, 0.5, 0.9])
    drawn = simulate([10, 1000, 5], caps, 500, 3)
    assert (
        drawn.shape == (500, 3)
        and np.allclose(drawn.sum(1), 1)
        and (drawn <= caps + 1e-12).all()
        and (drawn >= 0).all()
    )
    tight = np.array([0.2, 0.5, 0.3])
    np.testing.assert_allclose(simulate([10, 1000, 5], tight, 50, 3), np.tile(tight, (50, 1)), atol=1e-12)


@pytest.mark.slow
def test_boosting_fits_what_a_line_cannot():
    draw = np.random.default_rng(1)
    x = draw.random((600, 4))
    y = np.where(x[:, 0] > 0.5, 2.0, 0.0) + np.where((x[:, 1] > 0.3) & (x[:, 2] > 0.6), 1.0, 0.0)
    model = fit(x[:500], y[:500], "boosting")
    assert np.abs(model(x[500:]) - y[500:]).mean() < 0.05
    assert (model(x) == fit(x[:500], y[:500], "boosting")(x)).all()
    assert cross_validate(x, y, "boosting") > 0.9 > cross_validate(x, draw.random(600), "boosting")


def test_boosting_of_nothing_that_varies_is_the_mean():
    for regressor in ("boosting", "ridge"):
        constant = fit(np.zeros((50, 2)), np.full(50, 3.0), regressor)(np.ones((4, 2)))
        np.testing.assert_allclose(constant, 3.0, rtol=1e-12)
    many = np.arange(2000.0)[:, None]  # more distinct values than bins
    assert np.abs(fit(many, many[:, 0], "boosting")(many) - many[:, 0]).mean() < 20


@pytest.mark.parametrize("regressor", ["boosting", "ridge"])
def test_the_fit_is_the_same_on_any_number_of_threads(regressor):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    draw = np.random.default_rng(2)
    x = draw.dirichlet(np.ones(6), 800)
    y = np.sin(6 * x[:, 0]) + x[:, 1] ** 2 - np.sqrt(x[:, 2])
    found = []
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads):
            found.append(fit(x, y, regressor)(x[:50]))
    assert (found[0] == found[1]).all()


def test_spearman_counts_ties_by_their_mean_rank_and_constants_as_nothing():
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(4.5 / 22.5**0.5)
    assert spearman(np.array([1.0, 5, 9]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert spearman(np.ones(4), np.arange(4)) == 0
