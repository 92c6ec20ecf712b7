"""MinHash from shards to clusters: recall and precision against exact Jaccard, independence of order, resumption."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

from benchmarks.data.corpus import altered
from hone.data.corpus import Corpus
from hone.data.dedup import joining
from hone.data.dedup import keys as key_files
from hone.data.dedup.minhash import MinHash
from hone.data.dedup.simhash import SimHash
from hone.text.batch import Texts
from hone.text.dedup import tables, union_find
from hone.text.dedup.union_find import join_equal
from tests.text.dedup import oracles

HEADING = re.compile(
    r"(?m)^\s*(?:(?:CHAPTER|Chapter|LETTER|Letter)\s+[IVXLC\d]+\b.*|(?:ADVENTURE )?[IVX\d]+\. [A-Z' -]+)$"
)


def clusters(texts: list[str], **options) -> list[set[int]]:
    """Groups of more than one of `texts`."""
    technique = MinHash(**options)
    keys, worded = technique.keys(Texts.of(texts))
    parents = union_find.singles(len(texts))
    places = np.flatnonzero(worded)
    for band in keys:
        here = union_find.singles(len(places))
        join_equal(here, band[worded])
        union_find.join(parents, places, places[here])
    union_find.flatten(parents)
    groups = defaultdict(set)
    for index, root in enumerate(parents.tolist()):
        groups[root].add(index)
    return [group for group in groups.values() if len(group) > 1]


@pytest.fixture(scope="module")
def known() -> tuple[list[str], list[tuple[int, int, float]]]:
    """Texts, and pairs of them with their exact Jaccard similarity; all other pairs share nothing."""
    draw = random.Random(5)
    texts, pairs = [], []
    for number in range(700):
        vocabulary = [f"{draw.choice('bcdfglmprst')}{draw.choice('aeiou')}{number}x{word}" for word in range(150)]
        text = " ".join(draw.choice(vocabulary) for _ in range(draw.randrange(40, 400)))
        copy = altered(text, draw)
        pairs.append((len(texts), len(texts) + 1, oracles.jaccard(oracles.shingles(text), oracles.shingles(copy))))
        texts += [text, copy]
    return texts, pairs


def test_recall_and_precision_against_exact_jaccard(known):
    texts, pairs = known
    together = {frozenset(group) for group in clusters(texts)}
    assert together <= {frozenset(pair[:2]) for pair in pairs}, "texts that share nothing were joined"
    found = {low: [frozenset(pair[:2]) in together for pair in pairs if low <= pair[2] < high] for low, high in
             ((0.95, 1.01), (0.8, 0.95), (0.7, 0.8), (0.0, 0.5))}  # fmt: skip
    assert all(found[0.95]) and np.mean(found[0.8]) >= 0.98 and np.mean(found[0.7]) >= 0.6
    assert np.mean(found[0.0]) <= 0.1
    near = [value >= 0.7 for one, other, value in pairs if frozenset((one, other)) in together]
    assert np.mean(near) >= 0.88


def test_more_bands_find_more_and_more_rows_demand_more(known):
    texts, pairs = known

    def counted(**options):
        return sum(len(group) - 1 for group in clusters(texts, **options))

    assert counted(bands=30) > counted() > counted(bands=5)
    assert counted(rows=4) > counted() > counted(rows=20)
    exact = sum(value == 1 for _, _, value in pairs)
    assert counted(bands=1, rows=200) >= exact


def test_removals_do_not_depend_on_order_or_shards(known, tmp_path):
    texts = known[0][:400]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    first = oracles.removed(MinHash(), tmp_path / "first", texts, ids)
    assert len(first) > 80 and all(stays < gone and stays not in first for gone, stays in first.items())
    for number, num_shards in enumerate((1, 3, 40)):
        rows = list(zip(texts, ids))
        random.Random(number).shuffle(rows)
        again = oracles.removed(MinHash(), tmp_path / str(number), *map(list, zip(*rows)), num_shards)
        assert again == first


@pytest.mark.slow
def test_ranges_of_keys_give_the_same_clusters(known, tmp_path, monkeypatch):
    texts = known[0]
    corpus = oracles.corpus_of(tmp_path / "in", texts, [str(place) for place in range(len(texts))], 4)
    found = []
    for most in (10**6, 700, 100):
        monkeypatch.setattr(joining, "SORT_KEYS", most)
        state = tmp_path / str(most)
        state.mkdir()
        found.append(MinHash().compare(corpus, np.ones(len(texts), bool), state).stands.tolist())
        assert len(list(state.glob("join-*.npy"))) == {10**6: 1, 700: 14 * 2, 100: 14 * 16}[most]
    assert found[0] == found[1] == found[2] != list(range(len(texts)))


def test_batches_of_one_text_sign_the_same(known, tmp_path):
    texts = [*known[0][:30], "", "word", "?", "long " * 5000]
    corpus = oracles.corpus_of(tmp_path / "in", texts, [str(place) for place in range(len(texts))], 2, rows=7)
    kept = np.ones(len(texts), bool)
    kept[[0, 5, 31]] = False
    technique = MinHash()
    read = []
    for num_bytes in (1, 5000, 1 << 30):
        state = tmp_path / str(num_bytes)
        state.mkdir()
        files = key_files.sign_shards(corpus, kept, state, 14, technique.keys, num_bytes)
        read.append(key_files.gather(files, 15, 0, 15))
        assert all((key_files.gather(files, 15, row, row + 1)[1][0] == read[-1][1][row]).all() for row in range(15))
    for one, other in itertools.combinations(read, 2):
        assert all((a == b).all() for a, b in zip(one, other))
    assert (
        read[0][0].tolist()
        == read[0][1][0].tolist()
        == [place for place in range(len(texts)) if place not in (0, 5, 30, 31, 32)]
    )


def test_a_resumed_run_does_only_what_is_missing(known, tmp_path, monkeypatch):
    texts = known[0][:200]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    corpus = oracles.corpus_of(tmp_path / "in", texts, ids, 4)
    kept, state = np.ones(len(texts), bool), tmp_path / "state"
    state.mkdir()
    monkeypatch.setattr(joining, "TASK_KEYS", 600)
    whole = MinHash().compare(corpus, kept, state).stands
    names = {path.name for path in state.iterdir()}
    assert len(names) == 4 + 2 * 5, "three of fourteen bands a task"
    signed, compared = [], []
    keys, equal = MinHash.keys, tables.join_equal
    monkeypatch.setattr(MinHash, "keys", lambda self, batch: signed.append(batch.num_texts) or keys(self, batch))
    monkeypatch.setattr(tables, "join_equal", lambda *args: compared.append(1) or equal(*args))
    (state / "join-002.done").unlink()
    assert (MinHash().compare(corpus, kept, state).stands == whole).all()
    assert (signed, len(compared)) == ([], 3) and {path.name for path in state.iterdir()} == names
    (state / "keys-00002.u64").unlink()
    assert (MinHash().compare(corpus, kept, state).stands == whole).all()
    assert sum(signed) == 50 and len(compared) == 3, "the same keys made again were compared again"
    (state / "keys-00002.u64").unlink()
    kept[100:150:2] = False
    fewer = MinHash().compare(corpus, kept, state).stands
    assert (fewer[~kept] == np.flatnonzero(~kept)).all() and len(compared) == 3 + 14, (
        "groups of other keys were taken over"
    )


def test_shards_may_be_prepared_one_by_one_anywhere(known, tmp_path):
    texts = known[0][:200]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    corpus = oracles.corpus_of(tmp_path / "in", texts, ids, 5)
    kept = np.ones(len(texts), bool)
    kept[::7] = False
    for technique in (MinHash(), SimHash()):
        alone, together = tmp_path / f"{technique.reason}-alone", tmp_path / f"{technique.reason}-together"
        alone.mkdir()
        together.mkdir()
        for part in reversed(corpus.parts()):
            technique.prepare(Corpus.of(part), kept, alone)
        prepared = {path.name: path.read_bytes() for path in alone.iterdir()}
        stands = technique.compare(corpus, kept, together).stands
        assert (technique.compare(corpus, kept, alone).stands == stands).all()
        assert len(prepared) == 5 and all((together / name).read_bytes() == raw for name, raw in prepared.items())
        assert (stands[~kept] == np.flatnonzero(~kept)).all() and kept[stands[kept]].all()


def test_a_torn_file_is_an_error(known, tmp_path):
    corpus = oracles.corpus_of(tmp_path / "in", known[0][:20], [str(place) for place in range(20)])
    (tmp_path / "keys-00000.u64").write_bytes(b"\0" * 100)
    with pytest.raises(AssertionError, match="100 bytes"):
        MinHash().compare(corpus, np.ones(20, bool), tmp_path)


def test_wordless_and_short_texts():
    assert clusters(["", "!!!", "?"]) == []
    assert clusters(["two words", "Two Words!", "two", "two", "two words more"]) == [{0, 1}, {2, 3}]


def test_an_empty_corpus_and_one_without_words(tmp_path):
    for number, texts in enumerate(([], ["?", "!"])):
        assert (
            oracles.removed(MinHash(), tmp_path / str(number), texts, [str(place) for place in range(len(texts))]) == {}
        )


def test_articles_with_published_truth(shared_data):
    folder = shared_data / "neardup"
    rows = [line.split(" ", 1) for line in (folder / "articles_100.train").read_text(encoding="utf8").splitlines()]
    truth = {frozenset(line.split()) for line in (folder / "articles_100.truth").read_text().splitlines()}
    assert {frozenset(rows[i][0] for i in group) for group in clusters([text for _, text in rows])} == truth


def test_chapters_of_all_editions_meet_and_no_others(shared_data):
    chapters, names = [], []
    for file in sorted((shared_data / "neardup" / "gutenberg_revisions").iterdir()):
        raw = gzip.decompress(file.read_bytes())
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = raw.decode("latin-1")
        parts = [part for part in HEADING.split(text.replace("\r", ""))[1:] if len(part) > 1000]
        chapters += parts
        names += [(file.name[:8], number) for number in range(len(parts))]
    assert len(set(names)) == 128 and len(chapters) == 544
    groups = clusters(chapters)
    impure = [group for group in groups if len({names[index] for index in group}) > 1]
    assert len(groups) - len(impure) >= 127 and len(impure) <= 1
    assert sum(map(len, groups)) >= 0.97 * len(chapters), "chapters that met no other edition of theirs"


def test_specs_do_not_load_the_kernels():
    code = "import sys; from hone.data import DEDUPS; [DEDUPS.read(name) for name in DEDUPS]; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
