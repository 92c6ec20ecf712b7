"""UtiliMax: the optimum an independent solver finds, utilities from tables and from runs, and what they may not be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hone.base.artifact import start
from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.feed import MIXTURES
from hone.feed.mix.base import Source
from hone.feed.mix.simplex import fill
from hone.feed.mix.utilimax import best_portfolio

SOURCES = [Source("books", 1000), Source("code", 1000), Source("web", 1000)]


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_an_independent_solvers(seed):
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(seed)
    n, tasks = int(draw.integers(2, 20)), int(draw.integers(1, 25))
    utility = draw.random((n, tasks))
    caps = np.minimum(draw.random(n) * draw.choice([0.5, 1, 4]) + 1.05 / n, 1)
    risk = float(draw.choice([0, 0.01, 0.1, 1.0]))

    def value(w: np.ndarray) -> float:
        return float(np.linalg.norm(w @ utility - 1) + risk * n * (w @ w))

    found = best_portfolio(utility, caps, risk)
    assert found.sum() == pytest.approx(1, abs=1e-9) and (found >= 0).all() and (found <= caps + 1e-12).all()
    theirs = optimize.minimize(
        value,
        fill(np.ones(n), caps),
        method="SLSQP",
        bounds=[(0, cap) for cap in caps],
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-13, "maxiter": 2000},
    )
    assert value(found) <= theirs.fun + 1e-8
    if risk:  # then the optimum is one point
        np.testing.assert_allclose(found, theirs.x, atol=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_degenerate_problems_keep_the_caps_and_reach_the_least_value(seed):
    """Sources best at every task, ties, caps that leave one choice, no risk and much: no direction may lead lower."""
    draw = np.random.default_rng(seed)
    n, tasks = int(draw.integers(1, 48)), int(draw.integers(1, 60))
    utility = np.round(draw.random((n, tasks)), int(draw.choice([0, 1, 9])))
    utility[: int(draw.integers(0, 1 + n // 4))] = 1.0
    wanted = draw.random(n) + 1e-3
    caps = np.minimum(wanted / wanted.sum() * draw.choice([1, 1 + 1e-9, 1.5, 50]), 1) if seed % 2 else np.ones(n)
    risk = float(draw.choice([0, 1e-6, 0.01, 1.0, 1e6]))

    def value(w: np.ndarray) -> float:
        return float(np.linalg.norm(w @ utility - 1) + risk * n * (w @ w))

    found = best_portfolio(utility, caps, risk)
    assert found.sum() == pytest.approx(1, abs=1e-12) and (found >= 0).all() and (found <= caps + 1e-12).all()
    for step in (1.0, 1e-2, 1e-4):
        for _ in range(10):
            other = fill(draw.random(n) ** draw.choice([1, 8]) + 1e-9, caps)
            assert value(found) <= value((1 - step) * found + step * other) + 2e-7 * max(value(found), 1)


def test_one_source_that_is_best_at_all_gets_all_without_risk():
    utility = np.array([[1.0, 1.0], [0.2, 0.1], [0.3, 0.9]])
    np.testing.assert_allclose(best_portfolio(utility, np.ones(3), 0.0), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(best_portfolio(utility, np.array([0.4, 1.0, 1.0]), 0.0), [0.4, 0, 0.6], atol=1e-6)
    np.testing.assert_allclose(best_portfolio(utility, np.ones(3), 1e6), [1 / 3] * 3, atol=1e-5)


def test_weights_from_a_table_with_their_reasons(tmp_path):
    table = {"web": {"qa": 3.0, "math": 4.0}, "code": {"qa": 4.0, "math": 1.0}, "books": {"qa": 2.0, "math": 3.0}}
    (tmp_path / "losses.json").write_text(json.dumps(table))
    mixture = MIXTURES.read({"kind": "utilimax", "table": str(tmp_path / "losses.json"), "risk": 0.1, "max_epochs": 2})
    chosen = mixture.weigh(SOURCES, 3000)
    assert chosen.notes["utilities"] == {
        "books": {"qa": 1.0, "math": pytest.approx(1 / 3)},
        "code": {"qa": 0.0, "math": 1.0},
        "web": {"qa": 0.5, "math": 0.0},
    }
    books, code, web = chosen.shares
    assert books.weight > code.weight > web.weight and books.utility == pytest.approx(2 / 3)
    assert "most for math (1.000)" in code.reason
    assert sum(chosen.weights.values()) == pytest.approx(1)
    better = MIXTURES.read({**mixture.model_dump(), "lower_is_better": False}).weigh(SOURCES, 3000)
    assert better.weights["web"] > better.weights["books"]
    assert [*mixture.files()] == ["mixture.table"]
    tight = MIXTURES.read({**mixture.model_dump(), "risk": 0.0, "max_epochs": 1.1}).weigh(SOURCES, 3000)
    assert [share.capped for share in tight.shares] == [True, True, False]


def test_weights_from_runs(tmp_path):
    class Nothing(Spec):
        pass

    values = {"books": (2.0, 5.0), "code": (4.0, 1.0), "web": (3.0, 3.0)}
    for source, losses in values.items():
        draft = start(tmp_path / f"train-{source}", kind="train", spec=Nothing())
        with draft:
            for task, loss in zip(("books", "code"), losses):
                draft.record(f"val_loss_{task}", loss, "nats/token")
            draft.record("time_s", 1.0, "s")
            draft.commit()
    runs = {source: str(tmp_path / f"train-{source}") for source in values}
    chosen = MIXTURES.read({"kind": "utilimax", "runs": runs, "risk": 0.01}).weigh(SOURCES, 300)
    assert chosen.notes["utilities"]["web"] == {"val_loss_books": 0.5, "val_loss_code": 0.5}
    assert chosen.notes["utilities"]["books"] == {"val_loss_books": 1.0, "val_loss_code": 0.0}
    one = MIXTURES.read({"kind": "utilimax", "runs": runs, "tasks": "val_loss_code"}).weigh(SOURCES, 300)
    assert [*one.notes["reached"]] == ["val_loss_code"] and one.weights["code"] == max(one.weights.values())
    assert len(MIXTURES.read({"kind": "utilimax", "runs": runs}).files()) == 3
    with pytest.raises(SpecError, match="has no figure 'val_loss_poems'"):
        MIXTURES.read({"kind": "utilimax", "runs": runs, "tasks": ["val_loss_poems"]}).weigh(SOURCES, 300)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "not a table of numbers"),
        ('{"books": {"qa": "much"}}', "not a table of numbers"),
        ('{"books": {"qa": 1}, "code": {"qa": 1}}', "does not name web"),
        ('{"books": {"qa": 1}, "code": {"qa": 1}, "web": {"math": 1}}', "'web' has"),
        ('{"books": {"qa": 1}, "code": {"qa": 1}, "web": {"qa": NaN}}', "'web' has"),
        ('{"books": {}, "code": {}, "web": {}}', "the tasks none"),
    ],
)
def test_tables_that_do_not_fit_are_named(tmp_path, content, said):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(SpecError, match=said):
        MIXTURES.read({"kind": "utilimax", "table": str(tmp_path / "table.json")}).weigh(SOURCES, 100)


def test_utilities_must_come_from_somewhere(tmp_path):
    with pytest.raises(SpecError, match="needs utilities"):
        MIXTURES.read("utilimax").weigh(SOURCES, 100)
    with pytest.raises(SpecError, match="no file"):
        MIXTURES.read({"kind": "utilimax", "table": str(tmp_path / "none.json")}).weigh(SOURCES, 100)


def test_a_task_on_which_all_are_alike_decides_nothing(tmp_path):
    table = {source.name: {"same": 2.0} for source in SOURCES}
    (tmp_path / "table.json").write_text(json.dumps(table))
    chosen = MIXTURES.read({"kind": "utilimax", "table": str(tmp_path / "table.json")}).weigh(SOURCES, 100)
    assert list(chosen.weights.values()) == pytest.approx([1 / 3] * 3)
