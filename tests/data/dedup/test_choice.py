"""Which copy stays, clusters as columns, and documents that an earlier artifact has."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data import DEDUPS
from hone.data.annotate import annotate, read_items
from hone.data.corpus import Corpus
from hone.data.dedup.groups import ascending, seconds
from hone.data.stage import Data
from hone.feed.files.listing import list_source
from hone.text.langid.identify import Identifier
from tests.data.stories import story

QUIET = Run(quiet=True)


def write(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(source: Path | list[str], out: Path, dedups: list, run: Run = QUIET, **changes) -> Artifact:
    spec = {"source": source if isinstance(source, list) else str(source), "tokenizer": {"vocab_size": 300}}
    return Data.read({**spec, "filters": ["length"], "dedups": dedups, **changes}).make(out, run=run)


def kept(made: Artifact) -> list[dict]:
    return parquet.read_table(made.folder / "documents").to_pylist()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Six stories; three near-copies of story 0 in two folders, with dates and scores."""
    folder = tmp_path_factory.mktemp("copies")
    write(
        folder / "news",
        [{"text": story(0, 1500), "date": "2019-05-01", "stars": 2}, *({"text": story(i)} for i in range(1, 4))],
    )
    write(
        folder / "web",
        [
            {"text": story(0, 1500) + " More.", "date": "2023-01-01T00:00:00Z", "stars": 5},
            {"text": story(0, 1500) + " Even more words.", "date": "2021", "stars": 1},
            *({"text": story(i)} for i in range(4, 7)),
        ],
    )
    return folder


@pytest.fixture(scope="module")
def corpus(source, tmp_path_factory) -> Corpus:
    shard = tmp_path_factory.mktemp("corpus") / "documents.parquet"
    files = list_source(str(source)).files
    options = Data.read({"metadata_fields": ["date", "stars"]}).options
    annotate(read_items(files, options), shard, identifier=Identifier())
    return Corpus([shard])


@pytest.mark.parametrize(
    "options, ending",
    [
        ({"keep": "longest"}, " Even more words."),
        ({"keep": "newest", "column": "date"}, " More."),
        ({"keep": "highest", "column": "stars"}, " More."),
        ({"keep": "lowest", "column": "stars"}, " Even more words."),
        ({"keep": "lowest", "column": "words"}, ""),
        ({"keep": "first"}, ""),
        ({"keep": "source", "sources": ["news"]}, ""),
        ({"keep": "source", "sources": ["web/", "news/"]}, None),
    ],
)
@pytest.mark.parametrize("kind", ["minhash", "simhash"])
def test_the_wanted_copy_stays(corpus, tmp_path, options, ending, kind):
    found = DEDUPS.read({"kind": kind, **options}).compare(corpus, np.ones(len(corpus), bool), tmp_path)
    texts = dict(corpus.texts(corpus.shards[0], 0, np.ones(len(corpus), bool)))
    near = [index for index, text in texts.items() if text.startswith(story(0, 1500))]
    (stays,) = {int(found.stands[index]) for index in near}
    assert len(near) == 3 and found.earlier == {}
    if ending is None:
        assert corpus.columns["source"][stays].startswith("web/")
    else:
        assert texts[stays] == story(0, 1500) + ending
    assert all(found.stands[index] == index for index in texts if index not in near)


def test_exact_keeps_the_newest_and_chains_join_clusters(tmp_path):
    text = story(9, 1500)
    rows = [{"text": text, "date": day} for day in ("2020-01-01", "2022-01-01", "2021-01-01")]
    write(
        tmp_path / "in", [*rows, {"text": text + " And.", "date": "2001-01-01"}, {"text": story(2)}, {"text": "short"}]
    )
    dedups = [{"kind": "exact", "keep": "newest", "column": "date"}, {"kind": "minhash", "keep": "longest"}]
    made = make(tmp_path / "in", tmp_path / "out", dedups, metadata_fields=["date"], validation_fraction=0)
    (row,) = (row for row in kept(made) if row["text"].startswith(text))
    assert row["text"] == text + " And." and row["cluster_size"] == 4
    signals = parquet.read_table(made.folder / "signals").to_pylist()
    assert [(one["cluster"], one["cluster_size"]) for one in signals if one["reason"] == "too_short"] == [(None, None)]
    assert sum(one["cluster"] == row["id"] for one in signals) == 4


KINDS = ("exact", "minhash", "simhash")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Artifact:
    """Eight stories that nothing of any kind is dropped from."""
    folder = tmp_path_factory.mktemp("earlier")
    write(folder / "old", [{"text": story(i, 1200)} for i in range(8)])
    return make(folder / "old", folder / "first", list(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_earlier_artifact_has_is_dropped_and_counted_apart(earlier, tmp_path, kind):
    new = [{"text": story(i, 1200)} for i in (3, 5, 20, 21, 21, 3)]
    write(tmp_path / "new", new)
    given = [{"kind": kind, "against": [str(earlier.folder)]}]
    made = make(tmp_path / "new", tmp_path / "second", given)
    rows = kept(made)
    assert sorted(row["text"] for row in rows) == sorted([story(20, 1200), story(21, 1200)])
    step = json.loads((made.folder / "stats.json").read_text())["steps"][-1]
    reason = {"exact": "exact_duplicate", "minhash": "near_duplicate", "simhash": "near_duplicate_fingerprint"}[kind]
    assert {name: row["documents"] for name, row in step["reasons"].items()} == {f"{reason}_of_earlier": 3, reason: 1}
    there = {row["text"]: row["id"] for row in kept(earlier)}
    assert len(there) == 8
    signals = parquet.read_table(made.folder / "signals").to_pylist()
    gone = [row for row in signals if row["reason"] == f"{reason}_of_earlier"]
    assert sorted(row["cluster"] for row in gone) == sorted(there[story(i, 1200)] for i in (3, 3, 5))
    shown = [json.loads(line) for line in (made.folder / "dropped.jsonl").read_text().splitlines()]
    assert {row["duplicate_of"] for row in shown if row["reason"].endswith("earlier")} == {
        f"earlier document {there[story(i, 1200)]}" for i in (3, 5)
    }


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(source, tmp_path):
    write(tmp_path / "old", [{"text": story(i)} for i in range(3)])
    old = make(tmp_path / "old", tmp_path / "first", [])
    given = [{"kind": "minhash", "keep": "longest", "against": [str(old.folder)]}]
    one = make(source, tmp_path / "one", given)
    two = make(source, tmp_path / "two", given, Run(quiet=True, executor={"kind": "processes", "workers": 2}))
    for name in ("documents", "signals"):
        for path in sorted((one.folder / name).iterdir()):
            assert path.read_bytes() == (two.folder / name / path.name).read_bytes()
    assert len(kept(one)) == 5


def test_mistakes_are_said(corpus, tmp_path):
    with pytest.raises(SpecError, match="keep = newest needs column"):
        Data.read({"dedups": [{"kind": "exact", "keep": "newest"}]})
    with pytest.raises(SpecError, match="keep = longest takes no column"):
        Data.read({"dedups": [{"kind": "exact", "keep": "longest", "column": "words"}]})
    with pytest.raises(SpecError, match="keep = source needs sources"):
        Data.read({"dedups": [{"kind": "exact", "keep": "source"}]})
    with pytest.raises(SpecError, match=r"dedups.0.column = 'wordz' is no column.*did you mean 'words'"):
        Data.read({"dedups": [{"kind": "exact", "keep": "highest", "column": "wordz"}]})
    for given, message in (
        ({"keep": "newest", "column": "stars"}, None),
        ({"keep": "newest", "column": "title"}, None),
        ({"keep": "highest", "column": "language"}, "holds no numbers"),
        ({"keep": "source", "sources": ["newz"]}, "names 'newz'.*\n.*did you mean 'news'"),
        ({"against": ["/nowhere"]}, "'/nowhere' is not a finished data artifact"),
    ):
        technique = DEDUPS.read({"kind": "minhash", **given})
        state = tmp_path / str(len(list(tmp_path.iterdir())))
        state.mkdir()
        if message is None:  # a number is seconds; a date that is missing everywhere leaves the choice to the ids
            technique.compare(corpus, np.ones(len(corpus), bool), state)
            continue
        with pytest.raises(SpecError, match=message):
            technique.compare(corpus, np.ones(len(corpus), bool), state)
    write(tmp_path / "in", [{"text": story(0), "date": "soon"}, {"text": story(0), "date": "later"}])
    with pytest.raises(SpecError, match="no date in it can be read"):
        make(
            tmp_path / "in",
            tmp_path / "out",
            [{"kind": "exact", "keep": "newest", "column": "date"}],
            metadata_fields=["date"],
        )


def test_dates_and_numbers_keep_their_order():
    days = [
        "1969-12-31",
        "2001",
        "2001-02",
        "2001-02-03",
        "20010204",
        "2001-02-05T10:00:00+02:00",
        "Wed, 07 Feb 2001 10:00:00 GMT",
    ]
    found = [seconds(day) for day in days]
    assert found == sorted(found) and len(set(found)) == len(found) and found[1] == 978307200
    assert seconds(978307200) == 978307200.0
    assert all(np.isnan(seconds(bad)) for bad in ("", "soon", None, True, [1], "12345"))
    draw = random.Random(0)
    values = np.array(
        [draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300) for _ in range(200)] + [0.0, -0.0, np.inf, -np.inf]
    )
    assert (np.argsort(ascending(values), kind="stable") == np.argsort(values, kind="stable")).all()
    assert ascending(np.array([np.nan]))[0] > ascending(np.array([np.inf]))[0]
