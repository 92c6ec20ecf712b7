"""Deciding again by a finished artifact's columns: its own figures to the number, and what a run with other filters keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.cli import main
from hone.data import annotate
from hone.data.corpus import Columns
from hone.data.filters import decide as module
from hone.data.filters.decide import redecide
from hone.data.stage import Data
from tests.data.stories import story

OWN = [{"kind": "length", "min_bytes": 300}, {"kind": "gopher_quality", "min_words": 60}]
LOOSER = [{"kind": "length", "min_bytes": 50}, {"kind": "gopher_quality", "min_words": 20}]
STRICTER = [{"kind": "length", "min_bytes": 400}, {"kind": "gopher_quality", "min_words": 90}, "gopher_repetition"]
NOTICE = "This notice stands below all of them, and it is cut out of those that stay because five documents hold it."


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for number in range(5):
        texts = [story(100 * number + i, 12 * (1 + i % 12)) for i in range(40)]
        texts += [story(1, 240), "again and again " * 40, f"{story(900 + number, 120)}\n{NOTICE}"]
        rows = [{"text": text, "url": f"https://example.org/{number}/{i}"} for i, text in enumerate(texts)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "5.jsonl").write_text('{"text": "too short"}\n' * 3)  # a shard of which nothing is kept
    return folder


def make(source: Path, out: Path, filters: list, **changes) -> Artifact:
    spec = {"source": str(source), "tokenizer": {"vocab_size": 400}, "filters": filters, "dedups": ["exact"], **changes}
    return Data.read(spec).make(out, run=Run(quiet=True))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annotate, "TASK_BYTES", 1000)
        edits = [{"kind": "lines", "min_documents": 5}]
        return make(source, tmp_path_factory.mktemp("made") / "data-text", OWN, edits=edits)


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 60)  # two shards at a time


def steps_of(artifact: Artifact) -> list[dict]:
    steps = json.loads((artifact.folder / "stats.json").read_text())["steps"]
    return [step for step in steps if step["slot"] == "filter"]


def table_of(artifact: Artifact, name: str, columns: list[str] | None = None):
    return parquet.read_table(artifact.folder / name, columns=columns)


def test_the_columns_of_all_that_was_read_are_kept(made):
    signals, documents = table_of(made, "signals"), table_of(made, "documents")
    assert len(list((made.folder / "signals").iterdir())) == 6 and len(list((made.folder / "documents").iterdir())) == 5
    assert len(signals) == made.figures["input_documents"].value == 218
    assert set(documents.schema.names) - set(signals.schema.names) == {"text", "split"}
    assert set(signals.schema.names) - set(documents.schema.names) == {"dropped_by", "reason"}
    kept = signals.filter(signals.column("dropped_by").is_null())
    assert kept.column("id").to_pylist() == documents.column("id").to_pylist()
    assert kept.column("reason").null_count == len(kept)
    # 'bytes' is what was measured, also of a document that an edit shortened later.
    sizes = (sum(table.column("bytes").to_pylist()) for table in (kept, documents))
    assert next(sizes) - next(sizes) == 4 * (len(NOTICE) + 1)  # the first that holds it keeps it


def test_what_dropped_each_document_is_what_stats_count(made):
    gone = table_of(made, "signals", ["dropped_by", "reason"]).to_pylist()
    for step in json.loads((made.folder / "stats.json").read_text())["steps"][1:]:
        for reason, count in step["reasons"].items():
            found = sum(row == {"dropped_by": step["name"], "reason": reason} for row in gone)
            assert found == count["documents"], (step["name"], reason)
    assert {row["dropped_by"] for row in gone} == {None, "length", "gopher_quality", "exact"}


def test_its_own_filters_give_its_own_figures(made, few_at_once):
    again = redecide(made.folder)
    assert again.steps == steps_of(made) == redecide(made.folder, OWN).steps
    nothing = {"documents": 0, "bytes": 0}
    assert again.counts["back"] == again.counts["gone"] == again.counts["gone_kept"] == nothing
    assert again.counts["passed"] == again.counts["passed_before"]
    assert again.counts["read"]["bytes"] == made.figures["input_bytes"].value


@pytest.mark.slow
@pytest.mark.parametrize("filters", [LOOSER, STRICTER, ["gopher_repetition"]], ids=["looser", "stricter", "others"])
def test_other_filters_keep_what_a_run_with_them_keeps(made, source, tmp_path, few_at_once, filters):
    run = make(source, tmp_path / "other", filters, dedups=[])
    again = redecide(made.folder, filters)
    assert again.steps == steps_of(run)
    ids = table_of(made, "signals", ["id"]).column("id").to_pylist()
    passed = {ident for ident, passes in zip(ids, again.passes, strict=True) if passes}
    assert passed == set(table_of(run, "documents", ["id"]).column("id").to_pylist())
    before = set(table_of(make(source, tmp_path / "own", OWN, dedups=[]), "documents", ["id"]).column("id").to_pylist())
    kept = set(table_of(made, "documents", ["id"]).column("id").to_pylist())
    counts = {name: count["documents"] for name, count in again.counts.items()}
    assert counts == {
        "read": len(ids),
        "passed": len(passed),
        "passed_before": len(before),
        "back": len(passed - before),
        "gone": len(before - passed),
        "gone_kept": len(kept - passed),
    }
    assert counts["back"] + counts["gone"] > 0


def test_no_text_is_needed(made, tmp_path, monkeypatch):
    bare = shutil.copytree(made.folder, tmp_path / "bare")
    for name in ("documents", "tokens"):
        shutil.rmtree(bare / name)
    assert redecide(bare, LOOSER).steps == redecide(made.folder, LOOSER).steps


def test_a_shard_is_opened_once_for_all_columns(made, monkeypatch):
    monkeypatch.setattr(Columns, "__getitem__", lambda columns, name: columns._read[name])
    columns = Columns(sorted((made.folder / "signals").iterdir()), ["bytes", "words", "language"])
    columns.read({"bytes", "language", "no such column"})
    assert columns["bytes"].sum() == made.figures["input_bytes"].value
    assert "en" in columns["language"]


def test_on_the_command_line(made, capsys):
    assert main(["redecide", str(made.folder), "--filters.1.min_words=20"]) == 0
    printed = capsys.readouterr().out
    again = redecide(made.folder, [OWN[0], {**OWN[1], "min_words": 20}])
    assert printed == "\n".join(again.lines()) + "\n"
    back = again.counts["back"]["documents"]
    assert back > 0 and any(
        line.startswith("come back") and f" {back:,} documents" in line for line in printed.splitlines()
    )
    assert "words >= 20" in printed and "min_words" not in printed
    assert main(["redecide", str(made.folder), "--filters=gopher_repetition"]) == 0
    assert "length" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--filters=[lenth]"], ("unknown filter 'lenth'", "did you mean 'length'")),
        (["--filters.2.min_words=1"], ("'2' is not a position in a list of 2",)),
        (["--filters.1.min_word=1"], ("GopherQuality has no field 'min_word'", "did you mean 'min_words'")),
        (["--filters=[{kind: expression, keep: 'wods > 3'}]"], ("no signal column 'wods'", "did you mean 'words'")),
        (["--filters=[]"], ("no filter to apply",)),
        (["--out=x"], ("no field 'out'",)),
    ],
)
def test_mistakes_are_said(made, capsys, options, words):
    assert main(["redecide", str(made.folder), *options]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and said.count("\n") == 2


def test_a_folder_that_keeps_no_columns(made, tmp_path):
    older = shutil.copytree(made.folder, tmp_path / "older")
    shutil.rmtree(older / "signals")
    with pytest.raises(ArtifactError, match="keeps no signals") as error:
        redecide(older)
    assert "--redo=older" in error.value.fix
    with pytest.raises(ArtifactError, match="not a data artifact"):
        redecide(tmp_path)
    with pytest.raises(SpecError, match="unknown filter"):
        redecide(made.folder, ["lenth"])
