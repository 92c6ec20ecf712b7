"""Rows of a mixture: exact shares, exact places, each source's own epochs, and the same stream after a resume."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.feed import CURRICULA, MIXTURES, load
from hone.feed.load import IGNORE, PackedTokens
from hone.feed.mix.mixed import MixedTokens, Shares, floor_sum
from hone.feed.mix.reading import Reading
from hone.feed.mix.sources import Joined, Sources, by_column
from hone.feed.order.documents import columns_of
from tests.feed.artifacts import numbered, write_artifact

WEIGHTS = st.lists(st.floats(0.001, 1), min_size=1, max_size=9)


@settings(max_examples=300)
@given(st.integers(0, 60), st.integers(1, 10**6), st.integers(0, 10**7), st.integers(0, 10**7))
def test_floor_sum_is_the_sum(count, modulus, step, offset):
    assert floor_sum(count, modulus, step, offset) == sum((step * i + offset) // modulus for i in range(count))


@settings(max_examples=60)
@given(WEIGHTS, st.integers(0, 5), st.integers(0, 3000))
def test_counts_before_a_row_are_exact(raw, seed, index):
    weights = np.array(raw) / sum(raw)
    shares = Shares(weights, seed)
    found = shares.sources(np.arange(index))
    assert shares.before(index) == np.bincount(found, minlength=len(weights)).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_shares_stay_exact_however_long_it_runs(seed):
    draw = np.random.default_rng(seed)
    weights = draw.dirichlet(np.full(int(draw.integers(2, 20)), draw.choice([0.3, 1, 5]))) + 1e-4
    weights /= weights.sum()
    shares = Shares(weights, seed)
    found = shares.sources(np.arange(500_000))
    rows = np.arange(1, 500_001)
    for number, weight in enumerate(weights):
        off = np.abs(np.cumsum(found == number) - rows * weight).max()
        assert off < 8, (
            f"off by {off} rows; independent draws would be by {2 * np.sqrt(5e5 * weight * (1 - weight)):.0f}"
        )
    far = 2**32
    assert np.abs(np.array(shares.before(far)) - far * weights).max() < 12
    assert sum(shares.before(far)) == far


@settings(max_examples=60)
@given(WEIGHTS, st.integers(0, 10**9), st.lists(st.integers(0, 3000), min_size=0, max_size=20))
def test_places_in_a_source_are_its_rows_in_order(raw, first, offsets):
    shares = Shares(np.array(raw) / sum(raw), 1)
    indices = first + np.array(offsets, np.int64)
    sources, ranks = shares.ranks(indices)
    for index, source, rank in zip(indices.tolist(), sources.tolist(), ranks.tolist()):
        before, after = shares.before(index), shares.before(index + 1)
        assert before[source] == rank and after[source] == rank + 1


@pytest.fixture
def folder(tmp_path):
    """40 documents of 3 groups, 20 tokens each with their end."""
    groups = [("a", "b", "a", "c")[number % 4] for number in range(40)]
    return write_artifact(tmp_path, numbered([19] * 40), {"group": groups})


def test_groups_of_one_artifact_are_streams_of_their_own(folder):
    data = PackedTokens(folder)
    parts = by_column(data, "group")
    assert {name: part.num_documents for name, part in parts.items()} == {"a": 20, "b": 10, "c": 10}
    whole = list(data.documents())
    for name, residues in (("a", (0, 2)), ("b", (1,)), ("c", (3,))):
        expected = [whole[number] for number in range(40) if number % 4 in residues]
        found = list(parts[name].documents())
        assert len(found) == len(expected) and all((one == other).all() for one, other in zip(found, expected))
        rows = [batch.tokens for batch in parts[name].in_order(3, 16)]
        flat = np.concatenate(expected)
        seen = np.concatenate(rows).ravel()[: len(flat) - 1]
        assert (seen == flat[:-1]).all()
    assert parts["a"].num_bytes == 20 * 19 and sum(part.num_tokens for part in parts.values()) == data.num_tokens
    assert set(parts["b"].columns("group")["group"]) == {"b"}


def test_a_mixture_reads_each_source_an_epoch_after_another(folder):
    parts = by_column(PackedTokens(folder), "group")
    mixed = MixedTokens(parts, {"a": 0.2, "b": 0.5, "c": 0.3})
    seq_len, rows = 19, 400
    batches = [mixed.batch(step, 8, seq_len, 3) for step in range(rows // 8)]
    tokens = np.concatenate([batch.tokens for batch in batches])
    counts = mixed.totals(rows, 3)
    assert sum(counts.values()) == rows
    for name, part in parts.items():
        stored = np.concatenate([batch.tokens for batch in part.in_order(100, seq_len)])
        places = {row.tobytes(): place for place, row in enumerate(stored)}
        order = [places[row.tobytes()] for row in tokens if row.tobytes() in places]
        assert len(order) == counts[name] and abs(counts[name] - rows * mixed.weights["abc".index(name)]) < 4
        num_rows = part.num_sequences(seq_len)
        for first in range(0, len(order) - num_rows + 1, num_rows):
            assert sorted(order[first : first + num_rows]) == list(range(num_rows)), "an epoch shows every row once"


def test_any_batch_stands_alone(folder):
    parts = by_column(PackedTokens(folder), "group")
    weights = {"a": 0.5, "b": 0.5, "c": 0.0}
    mixed = MixedTokens(parts, weights)
    stream = [mixed.batch(step, 5, 12, 7) for step in range(60)]
    for step in (59, 3, 41):
        fresh = MixedTokens(by_column(PackedTokens(folder), "group"), weights).batch(step, 5, 12, 7)
        assert all((one == other).all() for one, other in zip(fresh, stream[step]))
    halves = [mixed.sequences(np.arange(first, first + 5), 12, 7).tokens for first in (50, 55)]
    assert (np.concatenate(halves) == mixed.batch(5, 10, 12, 7).tokens).all()
    assert any(
        (one.tokens != other.tokens).any() for one, other in zip(stream, [mixed.batch(s, 5, 12, 8) for s in range(60)])
    )
    c_tokens = set(np.concatenate(list(parts["c"].documents())).tolist()) - {0}
    assert not c_tokens & set(np.concatenate([batch.tokens for batch in stream]).ravel().tolist())


def test_sources_of_several_folders(folder, tmp_path):
    other = write_artifact(tmp_path / "other", numbered([9] * 30), {"group": ["x"] * 30})
    sources = Sources({"long": folder, "short": other})
    assert sources.num_tokens == 800 + 300
    unweighted = sources.choose(None, 1100, 10)
    assert unweighted.weights == pytest.approx({"long": 8 / 11, "short": 3 / 11})
    chosen = sources.choose(MIXTURES.read("unimax"), 100, 10)
    assert chosen.weights == pytest.approx({"long": 0.5, "short": 0.5})
    feed = sources.feed(chosen, CURRICULA.read("random"), 100, 10, 0)
    batch = feed.batch(9, 10, 10, 0)
    assert batch.tokens.shape == (10, 10)
    plain = MixedTokens(sources.parts, chosen.weights).batch(9, 10, 10, 0)
    assert (plain.tokens == batch.tokens).all(), "random order is what reading without a curriculum gives"
    assert sources.epochs(chosen, 100, 10, 0) == pytest.approx({"long": 0.625, "short": 5 / 3}, rel=0.1)


def test_one_source_is_read_as_ever(folder):
    sources = Sources({"only": folder})
    assert sources.choose(None, 100, 1) is None
    feed = sources.feed(None, CURRICULA.read("random"), 90, 11, 4)
    for step in range(30):
        one, other = feed.batch(step, 3, 11, 4), PackedTokens(folder).batch(step, 3, 11, 4)
        assert all((a == b).all() for a, b in zip(one, other))


def test_groups_of_best_fit_rows_keep_documents_whole(folder):
    pytest.importorskip("numba")
    data = PackedTokens(folder)
    data.meta = {**data.meta, "packing": {"kind": "best_fit", "lengths": []}}
    for part in by_column(data, "group").values():
        expected = sorted((int(a), int(b)) for document in part.documents() for a, b in pairwise(document))
        batch = part.cut(np.arange(part.num_sequences(40)), 40)
        seen = zip(batch.tokens.ravel().tolist(), batch.targets.ravel().tolist())
        assert sorted(pair for pair in seen if pair[1] != IGNORE) == expected
        assert part.num_sequences(40) == part.num_documents / 2, "two documents of 19 predictions a row"


def test_a_curriculum_that_fits_one_source_only_is_said_at_once(folder):
    sources = Sources({"only": folder}, "group")
    chosen = sources.choose(
        MIXTURES.read({"kind": "fixed", "weights": {"a": 1, "b": 20, "c": 0}, "max_epochs": 99}), 500, 10
    )
    warmup = CURRICULA.read({"kind": "warmup_then_random", "fraction": 0.9, "signal": "bytes", "hard": "high"})
    with pytest.raises(SpecError, match="more than an epoch of 20"):
        sources.feed(chosen, warmup, 500, 10, 0)


def test_what_cannot_be_mixed_is_said(folder, tmp_path):
    with pytest.raises(SpecError, match="one source, 'only'"):
        Sources({"only": folder}).choose(MIXTURES.read("unimax"), 100, 1)
    with pytest.raises(SpecError, match="has no column 'nothing'"):
        Sources({"only": folder}, "nothing")
    other = write_artifact(tmp_path / "other", numbered([9] * 30), {"group": ["x"] * 30, "ratio": [0.5] * 30})
    with pytest.raises(SpecError, match="column of fractions"):
        Sources({"only": other}, "ratio")
    for place, merges in ((folder, []), (other, [("a", "b")])):  # the same vocabulary, cut by other rules
        tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, merges)).save(
            str(place / "tokenizer.json")
        )
    with pytest.raises(SpecError, match="have different tokenizers"):
        Sources({"one": folder, "two": other})
    with pytest.raises(SpecError, match="weights for a, sources b"):
        MixedTokens({"b": PackedTokens(folder)}, {"a": 1.0})
    with pytest.raises(SpecError, match="every weight is 0"):
        MixedTokens({"b": PackedTokens(folder)}, {"b": 0.0})
    next((folder / "documents").glob("*.parquet")).unlink()
    with pytest.raises(ArtifactError, match="20 documents of split 'train', but tokens/ has 40"):
        Sources({"only": folder}, "group")
    for path in (folder / "documents").glob("*.parquet"):
        path.unlink()
    with pytest.raises(ArtifactError, match="has no documents"):
        Sources({"only": folder}, "group")


def test_samples_are_the_sources_own_texts(folder):
    sources = Sources({"only": folder}, "group")
    seen = []

    class Look(type(MIXTURES.read("proportional"))):
        def wants(self, found, budget):
            seen.extend((source.name, source.sample(5), source.sample(50)) for source in found)
            return super().wants(found, budget)

    sources.choose(Look(kind="proportional"), 100, 1)
    for name, few, many in seen:
        own = {" ".join(map(str, document[:-1])) for document in sources.parts[name].documents()}
        assert len(few) == 5 and set(few) <= own and set(many) == own


def test_validation_rows_of_several_sources_come_in_their_shares(folder):
    parts = by_column(PackedTokens(folder), "group")
    joined = Joined(parts)
    batches = list(joined.in_order(7, 16))
    assert sum(len(batch.tokens) for batch in batches) == joined.num_sequences(16)
    stored = np.concatenate([batch.tokens for part in parts.values() for batch in part.in_order(9, 16)])
    tokens = np.concatenate([batch.tokens for batch in batches])
    assert sorted(map(bytes, tokens)) == sorted(map(bytes, stored))
    of_a = {bytes(row) for batch in parts["a"].in_order(9, 16) for row in batch.tokens}
    assert sum(bytes(row) in of_a for row in tokens[:12]) == 6
    assert joined.num_bytes == 40 * 19


@pytest.fixture
def flat(tmp_path):
    """As many sources as a flat folder of files makes."""
    documents = numbered([5 + number % 7 for number in range(200)])
    return write_artifact(tmp_path / "flat", documents, {"group": [f"{number % 100}.txt" for number in range(200)]})


def test_many_sources_read_the_table_once(flat, monkeypatch):
    reads = []

    def counted(folder, split, names, num_documents):
        reads.append((split, *names))
        return columns_of(folder, split, names, num_documents)

    monkeypatch.setattr(load, "columns_of", counted)
    sources = Sources({"flat": flat}, "group")
    assert len(sources.parts) == 100 and sorted(reads) == sorted(set(reads))
    for name, part in sources.parts.items():
        number = int(name.removesuffix(".txt"))
        assert part.numbers.tolist() == [number, number + 100] and part.num_documents == 2
        assert part.num_bytes == part.num_tokens - 2  # a byte a token here, and an end of text each


def test_many_sources_are_said_to_be_many(flat, tmp_path, capsys):
    artifact = Artifact.read(flat)
    (flat / "tokenizer.json").write_text("{}")
    mixture = MIXTURES.read({"kind": "proportional"})
    reading = Reading({"data": artifact}, mixture, CURRICULA.read("random"))
    said = []

    class Says(Run):
        def say(self, text):
            said.append(text)

    class Folder:
        folder = tmp_path

    reading.prepare(20, 4, 0, Folder(), Says(quiet=True))
    assert "100 sources" in said[0] and "mixture.by" in said[0] and "folder" in said[0] and len(said) == 9
    assert len(json.loads((tmp_path / "mixture.json").read_text())["shares"]) == 100
