"""Curricula: each row once an epoch, the rows of random order in another order, and difficulty that rises as said."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.feed import CURRICULA
from hone.feed.load import PackedTokens, shuffled
from hone.feed.order.base import sequence_means
from hone.feed.order.ordered import OrderedTokens
from tests.feed.artifacts import numbered, write_artifact

SIZES = [int(size) for size in np.random.default_rng(5).integers(3, 30, 90)]
SEQ_LEN = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    draw = np.random.default_rng(6)
    columns = {
        "compression_ratio": draw.gamma(3, 1, 90).tolist(),
        "words": SIZES,
        "hard_low": draw.random(90).tolist(),
        "holes": [float("nan") if number % 3 else float(number) for number in range(90)],
        "nothing": [float("nan")] * 90,
        "group": [("prose", "code", "web")[min(number // 40, 2)] for number in range(90)],
    }
    return PackedTokens(write_artifact(tmp_path_factory.mktemp("data"), numbered(SIZES), columns))


def made(kind: str, **options):
    return CURRICULA.read({"kind": kind, **options})


ALL = [
    ("random", {}),
    ("staged", {}),
    ("staged", {"num_stages": 1000}),
    ("competence", {}),
    ("warmup_then_random", {"fraction": 0.1}),
    ("multi_task", {}),
]


def test_every_curriculum_is_tested_here():
    assert {kind for kind, _ in ALL} == set(CURRICULA)


def naive_row_means(data: PackedTokens, values: np.ndarray, seq_len: int) -> list[float]:
    owners = [number for number, document in enumerate(data.documents()) for _ in document]
    rows = data.num_sequences(seq_len)
    return [
        float(np.mean([values[owner] for owner in owners[row * seq_len : (row + 1) * seq_len]])) for row in range(rows)
    ]


@pytest.mark.parametrize("seq_len", [1, 7, 16, 500, 5000])
def test_a_rows_difficulty_is_the_mean_over_its_tokens(data, seq_len):
    values = data.columns("compression_ratio")["compression_ratio"] + 1e6
    np.testing.assert_allclose(
        sequence_means(data, values, seq_len), naive_row_means(data, values, seq_len), rtol=1e-12
    )


def test_best_fit_rows_have_a_difficulty_too(data):
    pytest.importorskip("numba")
    fitted = PackedTokens(data.folder)
    fitted.meta = {**fitted.meta, "packing": {"kind": "best_fit"}}
    values = np.arange(90.0)
    means = sequence_means(fitted, values, 32)
    for row in range(fitted.num_sequences(32)):
        batch = fitted.cut(np.array([row]), 32)
        real = batch.document_ids[0] >= 0
        owners = [np.searchsorted(np.cumsum(SIZES), token) for token in batch.tokens[0][real]]
        assert means[row] == pytest.approx(np.mean(owners))


@pytest.mark.parametrize(("kind", "options"), ALL)
@pytest.mark.parametrize("epochs", [1, 2.5])
def test_each_row_once_an_epoch_and_none_that_random_order_would_not_show(data, kind, options, epochs):
    rows = data.num_sequences(SEQ_LEN)
    total = int(rows * epochs)
    places = made(kind, **options).order(data, SEQ_LEN, total, 3)(np.arange(total))
    random = made("random").order(data, SEQ_LEN, total, 3)(np.arange(total))
    counts = Counter(places.tolist())
    if kind == "competence":  # it may show rows again before an epoch ends; over the run they are as even
        assert len(counts) == rows and max(counts.values()) - min(counts.values()) <= 1
        return
    for first in range(0, total, rows):
        assert sorted(places[first : first + rows]) == sorted(random[first : first + rows])
        if first + rows <= total:
            assert len(set(places[first : first + rows].tolist())) == rows


@pytest.mark.parametrize(("kind", "options"), ALL)
def test_the_order_is_a_pure_function(data, kind, options):
    total = data.num_sequences(SEQ_LEN) * 3 // 2
    total -= total % 4
    curriculum = made(kind, **options)
    stream = [OrderedTokens(data, curriculum, total).batch(step, 4, SEQ_LEN, 9) for step in range(total // 4)]
    one = OrderedTokens(data, curriculum, total)
    for step in (total // 4 - 1, 0, 7, total // 8):
        assert all((a == b).all() for a, b in zip(one.batch(step, 4, SEQ_LEN, 9), stream[step]))
    halves = [one.sequences(np.arange(first, first + 2), SEQ_LEN, 9).tokens for first in (12, 14)]
    assert (np.concatenate(halves) == stream[3].tokens).all()
    other = [one.batch(step, 4, SEQ_LEN, 10).tokens for step in range(total // 4)]
    if options.get("num_stages") != 1000:
        assert any((a != b.tokens).any() for a, b in zip(other, stream))
    with pytest.raises(SpecError, match=f"order of {total} sequences"):
        one.batch(total // 4, 4, SEQ_LEN, 9)


def test_random_is_what_training_does_without(data):
    total = data.num_sequences(SEQ_LEN) * 2
    ordered = OrderedTokens(data, made("random"), total)
    for step in range(total // 5):
        assert (ordered.batch(step, 5, SEQ_LEN, 2).tokens == data.batch(step, 5, SEQ_LEN, 2).tokens).all()


@pytest.mark.parametrize(
    ("signal", "hard", "sign"), [("compression_ratio", None, -1), ("length", None, 1), ("hard_low", "low", -1)]
)
def test_stages_rise_and_are_shuffled_inside(data, signal, hard, sign):
    rows = data.num_sequences(SEQ_LEN)
    column = {"length": "words"}.get(signal, signal)
    hardness = np.array(naive_row_means(data, sign * data.columns(column)[column].astype(float), SEQ_LEN))
    places = made("staged", signal=signal, hard=hard, num_stages=4).order(data, SEQ_LEN, rows, 0)(np.arange(rows))
    stages = [hardness[places[np.arange(rows) * 4 // rows == stage]] for stage in range(4)]
    for earlier, later in pairwise(stages):
        assert earlier.max() <= later.min() + 1e-9
    assert any((np.diff(stage) < 0).any() for stage in stages)
    full = made("staged", signal=signal, hard=hard, num_stages=10**6).order(data, SEQ_LEN, rows, 0)(np.arange(rows))
    assert (np.diff(hardness[full]) >= -1e-9).all()


def test_a_short_training_by_stages_sees_the_hard_rows_too(data):
    total = data.num_sequences(SEQ_LEN) // 3
    places = made("staged").order(data, SEQ_LEN, total, 1)(np.arange(total))
    assert sorted(places) == sorted(shuffled(data.num_sequences(SEQ_LEN), 1, 0)[:total])


def test_a_warm_up_rises_and_the_rest_is_random(data):
    rows = data.num_sequences(SEQ_LEN)
    total = 2 * rows
    warm = round(0.25 * total)
    places = made("warmup_then_random", fraction=0.25).order(data, SEQ_LEN, total, 0)(np.arange(total))
    random = made("random").order(data, SEQ_LEN, total, 0)(np.arange(total))
    hardness = made("warmup_then_random").difficulty(data, SEQ_LEN)
    assert (np.diff(hardness[places[:warm]]) >= 0).all()
    assert (places[warm:] == random[warm:]).all() and set(places[:warm]) == set(random[:warm])
    with pytest.raises(SpecError, match="more than an epoch"):
        made("warmup_then_random", fraction=0.9).order(data, SEQ_LEN, total, 0)


@settings(max_examples=30)
@given(st.floats(0.01, 0.5), st.floats(0.05, 1), st.floats(0.5, 4), st.integers(1, 700), st.integers(0, 5))
def test_competence_is_never_exceeded(data, start, growth, power, total, seed):
    curriculum = made("competence", start=start, growth=growth, power=power)
    rows = data.num_sequences(SEQ_LEN)
    places = curriculum.order(data, SEQ_LEN, total, seed)(np.arange(total))
    rank = np.argsort(np.argsort(curriculum.difficulty(data, SEQ_LEN), kind="stable"))
    allowed = np.maximum(curriculum.competence(np.arange(total), total) * rows, 1)
    assert (rank[places] < allowed + 1e-9).all()


def test_competence_grows_as_in_the_paper():
    curriculum = made("competence", start=0.1, growth=0.5)
    c = curriculum.competence(np.arange(1001), 1000)
    assert c[0] == pytest.approx(0.1) and c[500] == 1 and c[1000] == 1 and (np.diff(c) >= 0).all()
    assert c[125] == pytest.approx((0.25 * (1 - 0.1**2) + 0.1**2) ** 0.5)
    linear = made("competence", start=0.1, growth=1.0, power=1.0).competence(np.arange(1001), 1000)
    np.testing.assert_allclose(np.diff(linear), 0.0009)


def test_competence_shows_easy_rows_first_and_all_in_the_end(data):
    rows = data.num_sequences(SEQ_LEN)
    curriculum = made("competence", growth=0.9)
    places = curriculum.order(data, SEQ_LEN, rows, 0)(np.arange(rows))
    hardness = curriculum.difficulty(data, SEQ_LEN)
    quarter = rows // 4
    means = [hardness[places[first : first + quarter]].mean() for first in range(0, 4 * quarter, quarter)]
    assert means[0] < means[1] < means[3]


def test_every_batch_holds_the_sources_in_their_shares(data):
    rows = data.num_sequences(SEQ_LEN)
    curriculum = made("multi_task")
    source = curriculum.sources(data, SEQ_LEN)
    places = curriculum.order(data, SEQ_LEN, rows, 0)(np.arange(rows))
    shares = np.bincount(source) / rows
    for first in range(0, rows - 12, 12):
        counts = np.bincount(source[places[first : first + 12]], minlength=3)
        assert (np.abs(counts - 12 * shares) <= 1.5).all()
    for number in range(3):
        own = places[source[places] == number]
        random = shuffled(rows, 0, 0)
        assert (own == random[source[random] == number]).all(), "inside a source the order is random order's"
    groups = data.columns("group")["group"]
    expected = [naive_row_means(data, groups == name, SEQ_LEN) for name in sorted(set(groups))]
    best = np.max(expected, 0)
    assert (np.array(expected)[source, np.arange(rows)] >= best - 1e-9).all()


def test_documents_without_a_value_are_in_the_middle(data):
    hardness = made("staged", signal="holes", hard="high").difficulty(data, SEQ_LEN)
    assert np.isfinite(hardness).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "staged", "signal": "hard_low"}, "whether high or low"),
        ({"kind": "staged", "signal": "group", "hard": "low"}, "column of text"),
        ({"kind": "staged", "signal": "nothing", "hard": "low"}, "no value for any document"),
        ({"kind": "staged", "signal": "flesch"}, "has no column 'flesch'"),
        ({"kind": "competence", "signal": "absent", "hard": "low"}, "has no column 'absent'"),
        ({"kind": "multi_task", "by": "hard_low"}, "column of fractions"),
    ],
)
def test_signals_that_do_not_fit_are_named(data, options, said):
    with pytest.raises(SpecError, match=said):
        CURRICULA.read(options).order(data, SEQ_LEN, 10, 0)


def test_a_column_that_is_not_there_comes_before_which_end_is_hard(data):
    with pytest.raises(SpecError, match="no column 'hard_lwo'") as error:
        made("staged", signal="hard_lwo").order(data, 16, 10, 0)
    assert "did you mean 'hard_low'?" in error.value.fix
    with pytest.raises(SpecError, match="whether high or low"):
        made("staged", signal="hard_low").order(data, 16, 10, 0)


@pytest.mark.parametrize("seq_len", [3, 7, 64])
@pytest.mark.parametrize("kind", ["stream", "best_fit"])
def test_a_row_is_of_the_source_of_most_of_its_tokens(data, monkeypatch, seq_len, kind):
    monkeypatch.setitem(data.meta, "packing", {"kind": kind})
    columns = data.columns("group")["group"]
    names = sorted(set(columns))
    shares = [sequence_means(data, (columns == name).astype(float), seq_len) for name in names]
    assert made("multi_task").sources(data, seq_len).tolist() == np.argmax(np.round(shares, 9), 0).tolist()
