"""The whole stage: same bytes from any place and after any kill, statistics that add up, mistakes said in one line."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import ArtifactError, DriftError, FitError, MissingExtra, SpecError
from hone.base.run import Run
from hone.data.stage import Data
from hone.data.tokens.tokenizer import load
from hone.feed.load import PackedTokens
from tests.data.stories import WORDS, story
from tests.forking import forking

QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder with good documents, duplicates, code and every sort of trouble."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": story(i)}) + "\n" for i in range(60)) + "{broken\n")
    (folder / "web").mkdir()
    for number in range(5):
        (folder / "web" / f"{number}.html").write_text(f"<html><body><p>{story(100 + number)}</p></body></html>")
    (folder / "copy.txt").write_text(story(3))
    (folder / "near.txt").write_text(story(4, 1200) + "<|endoftext|>" + story(4, 1200) + " And one more word.")
    (folder / "code.py").write_text("\n".join(f"value_{i} = {i}" for i in range(40)))
    (folder / "short.md").write_text("too short")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfd\xfc\xfb")
    (folder / "picture.png").write_bytes(b"PNG")
    return folder


def spec_of(source: Path, /, **changes) -> Data:
    tokenizer = {"vocab_size": 400}
    repetition = [{"kind": "length"}, {"kind": "gopher_quality"}]
    return Data.read({"source": str(source), "tokenizer": tokenizer, "filters": repetition, **changes})


@pytest.fixture(scope="module")
def made(source, tmp_path_factory) -> Artifact:
    return spec_of(source).make(tmp_path_factory.mktemp("made") / "data-text", run=QUIET)


def test_what_is_dropped_and_why(made):
    stats = json.loads((made.folder / "stats.json").read_text())
    steps = {step["name"]: step for step in stats["steps"]}
    assert list(steps) == ["read", "length", "gopher_quality", "exact", "minhash"]
    assert set(steps["read"]["reasons"]) == {"bad_json", "wrong_encoding"} and steps["read"]["skipped"] == {".png": 1}
    assert steps["length"]["reasons"]["too_short"]["documents"] == 1
    assert steps["exact"]["reasons"]["exact_duplicate"]["documents"] == 1
    assert steps["minhash"]["reasons"]["near_duplicate"]["documents"] == 1
    for before, after in zip(stats["steps"], stats["steps"][1:]):
        assert (before["documents_out"], before["bytes_out"]) == (after["documents_in"], after["bytes_in"])
    for step in stats["steps"]:
        assert step["documents_in"] - step["documents_out"] == sum(row["documents"] for row in step["reasons"].values())
        assert step["bytes_in"] - step["bytes_out"] == sum(row["bytes"] for row in step["reasons"].values())
    kept = made.figures["kept_documents"].value
    for table in ("languages", "sources"):
        assert sum(row["documents"] for row in stats[table].values()) == kept == 67
    assert stats["languages"]["code"]["documents"] == 1  # exempt from prose rules by their expression
    assert stats["warnings"] == ["filter 'gopher_quality' dropped nothing"]
    assert set(stats["packing"]) == {"256", "1024", "4096"}
    for ways in stats["packing"].values():
        assert set(ways) == {"stream", "best_fit"} and all(0 <= way["waste"] < 1 for way in ways.values())
        assert ways["best_fit"]["parted"] <= ways["stream"]["parted"]
    assert 0 < stats["packing"]["256"]["stream"]["waste"] < 0.2
    dropped = read_jsonl(made.folder / "dropped.jsonl")
    assert {row["reason"] for row in dropped} == {reason for step in stats["steps"] for reason in step["reasons"]}
    assert next(row for row in dropped if row["reason"] == "near_duplicate")["duplicate_of"] == "near.txt"
    assert len(read_jsonl(made.folder / "sample.jsonl")) == 12


def test_every_rule_says_what_it_does_alone_and_what_only_it_does(made, source, tmp_path):
    stats = json.loads((made.folder / "stats.json").read_text())
    length, gopher = stats["steps"][1:3]
    (short,) = (rule for rule in length["rules"] if rule["reason"] == "too_short")
    assert short["alone"]["documents"] == 1 and length["alone"]["documents"] == 1
    few = next(rule for rule in gopher["rules"] if rule["reason"] == "too_few_words")
    # The one short document fails both rules: neither is the only one that drops it.
    assert few["alone"]["documents"] == 1 and few["marginal"]["documents"] == short["marginal"]["documents"] == 0
    alone = spec_of(source, filters=[{"kind": "length"}], dedups=[]).make(tmp_path / "alone", run=QUIET)
    (rule, *_) = (
        rule
        for rule in json.loads((alone.folder / "stats.json").read_text())["steps"][1]["rules"]
        if rule["reason"] == "too_short"
    )
    assert rule["marginal"] == rule["alone"]


def test_a_scorer_is_a_column_that_filters_decide_by(tmp_path):
    from pyarrow import parquet

    for name, words in (("high", WORDS[:9]), ("low", WORDS[9:])):
        draw = random.Random(name)
        rows = [" ".join(draw.choices(words, k=80)) for _ in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (tmp_path / "in").mkdir()
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS[:9] if number % 2 else WORDS[9:], k=100)) for number in range(30)]
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    scorer = {"kind": "hashed_logistic", "high": [str(tmp_path / "high.jsonl")], "low": [str(tmp_path / "low.jsonl")]}
    own = {"kind": "expression", "keep": "quality >= 0.5", "reason": "poor"}
    spec = spec_of(tmp_path / "in", scorers=[{**scorer, "log_buckets": 12}], filters=[own], dedups=[])
    made = spec.make(tmp_path / "out", run=QUIET)
    assert sorted(row["text"] for row in parquet.read_table(made.folder / "documents").to_pylist()) == sorted(
        texts[1::2]
    )
    stats = json.loads((made.folder / "stats.json").read_text())
    assert stats["scorers"][0]["auc"] > 0.95 and stats["steps"][1]["reasons"]["poor"]["documents"] == 15
    with pytest.raises(SpecError, match="no signal column 'quality'"):
        spec_of(tmp_path / "in", filters=[own]).make(tmp_path / "none", run=QUIET)
    (tmp_path / "low.jsonl").write_text(json.dumps({"text": "something else"}) + "\n")
    with pytest.raises(DriftError):
        spec.make(tmp_path / "out", run=QUIET)


@pytest.mark.slow
def test_a_scorer_trained_again_in_its_place_is_opened_again(tmp_path):
    def kept(high: list[str], low: list[str]) -> list[str]:
        draw = random.Random(1)
        for name, words in (("high", high), ("low", low)):
            rows = [" ".join(draw.choices(words, k=80)) for _ in range(60)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        seeds = {name: [str(tmp_path / f"{name}.jsonl")] for name in ("high", "low")}
        scorer = {"kind": "hashed_logistic", **seeds, "log_buckets": 12}
        own = {"kind": "expression", "keep": "quality >= 0.5", "reason": "poor"}
        spec = spec_of(tmp_path / "in", scorers=[scorer], filters=[own], dedups=[])
        made = spec.make(tmp_path / "out", run=QUIET)
        texts = [row["text"] for row in read_jsonl(made.folder / "sample.jsonl")]
        shutil.rmtree(made.folder)
        return texts

    (tmp_path / "in").mkdir()
    for name, words in (("one", WORDS[:9]), ("two", WORDS[9:])):
        (tmp_path / "in" / f"{name}.txt").write_text(" ".join(words * 12))
    assert kept(WORDS[:9], WORDS[9:]) != kept(WORDS[9:], WORDS[:9])


def test_edits_and_decontamination_leave_nothing_of_what_they_took(tmp_path):
    from pyarrow import parquet

    notice = "All rights reserved by nobody in particular, forever and a day."
    texts = [story(number) + "\n" + notice for number in range(12)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    question = " ".join(texts[5].split()[10:30])
    (tmp_path / "tests.jsonl").write_text(json.dumps({"question": question}) + "\n")
    changes = {
        "filters": [],
        "dedups": [],
        "edits": [{"kind": "lines", "min_documents": 3}],
        "decontaminations": [{"kind": "ngrams", "evaluations": [str(tmp_path / "tests.jsonl")]}],
    }
    spec = spec_of(tmp_path / "in", **changes)
    made = spec.make(tmp_path / "out", run=QUIET)
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    assert len(rows) == 11 and sum(notice in row["text"] for row in rows) <= 1
    assert all(row["bytes"] == len(row["text"].encode()) for row in rows)
    assert made.figures["kept_bytes"].value == sum(row["bytes"] for row in rows)
    assert made.figures["input_bytes"].value == sum(len(text.encode()) for text in texts)
    steps = json.loads((made.folder / "stats.json").read_text())["steps"]
    for before, after in itertools.pairwise(steps):
        assert (before["documents_out"], before["bytes_out"]) == (after["documents_in"], after["bytes_in"])
    for step in steps:
        assert step["bytes_in"] - step["bytes_out"] == sum(row["bytes"] for row in step["reasons"].values())
    assert steps[1]["figures"]["cut_documents"] >= 11 and steps[2]["reasons"]["contaminated"]["documents"] == 1
    (example,) = read_jsonl(made.folder / "contamination.jsonl")
    assert example["step"] == "ngrams"
    dropped = read_jsonl(made.folder / "dropped.jsonl")
    assert {row["text"].strip() for row in dropped if row["reason"] == "cut_out"} == {notice}
    assert any(question in row["text"] for row in dropped if row["reason"] == "contaminated")
    packed = [PackedTokens(made.folder, split) for split in ("train", "val")]
    assert sum(split.num_bytes for split in packed) == made.figures["kept_bytes"].value
    (tmp_path / "tests.jsonl").write_text(json.dumps({"question": "something else entirely"}) + "\n")
    with pytest.raises(DriftError):
        spec.make(tmp_path / "out", run=QUIET)


def test_documents_tokens_and_figures_agree(made):
    from pyarrow import parquet

    table = parquet.read_table(made.folder / "documents")
    encoder = load(made.folder)
    figures = {name: figure.value for name, figure in made.figures.items()}
    for split in ("train", "val"):
        packed = PackedTokens(made.folder, split)
        texts = [row["text"] for row in table.to_pylist() if row["split"] == split]
        assert packed.num_documents == len(texts) > 0
        for ids, text in zip(packed.documents(), texts):
            assert ids[-1] == encoder.eos_token_id and encoder.core.decode(ids[:-1].tolist()) == text
        assert packed.num_bytes == sum(len(text.encode()) for text in texts)
        assert figures[f"{split}_tokens"] == packed.num_tokens
    assert figures["kept_bytes"] == sum(len(text.encode()) for text in table.column("text").to_pylist())
    assert {"time_s", "peak_memory_bytes", "memory_growth_bytes", "energy_j", "bytes_per_token"} <= set(figures)
    for name in ("time_s", "peak_memory_bytes", "train_tokens", "kept_bytes"):
        assert made.figures[name].estimate.value > 0 and made.figures[name].estimate.formula
    # The sample was the whole input here, and only duplicates cannot be foreseen.
    assert abs(made.figures["train_tokens"].error) < 0.3


@pytest.mark.slow
def test_the_same_bytes_from_another_place(made, source, tmp_path):
    (tmp_path / "else").symlink_to(source)
    again = spec_of(tmp_path / "else").make(tmp_path / "out", run=QUIET)
    assert again.content == made.content
    for path in made.folder.rglob("*"):
        if path.is_file() and path.name != "hone.json":
            assert str(source).encode() not in path.read_bytes(), path


def test_deciding_again_needs_no_text(made):
    from pyarrow import parquet

    from hone.data import FILTERS

    names = [name for name in parquet.read_schema(next((made.folder / "documents").iterdir())).names if name != "text"]
    table = parquet.read_table(made.folder / "documents", columns=names)
    columns = {name: np.asarray(table.column(name).to_pylist()) for name in names}
    keep, reasons = FILTERS.read({"kind": "gopher_quality", "min_words": 200}).decide(columns)
    assert 0 < keep.sum() < len(keep) and set(reasons[~keep]) == {"too_few_words"}


@pytest.fixture(scope="module")
def run_killed():
    """Makes a data set in a process of its own: run_killed(out, source, kill_at, where)."""
    with forking("tests.data.killed:data") as call:
        yield call


@pytest.mark.slow
def test_killed_at_durable_steps_the_rerun_gives_the_same_bytes(run_killed, made, source, tmp_path, monkeypatch):
    out = tmp_path / "data-text"
    # Every run goes a few steps further than the one before and dies before or after a rename.
    for kill_at, where in ((3, "before"), (4, "after"), (5, "before"), (4, "after"), (2, "before"), (1, "commit")):
        assert run_killed(out, source, kill_at, where).returncode == -signal.SIGKILL
        assert out.exists() == (where == "commit"), "what only a draft needs is swept away after the rename"
    artifact = spec_of(source).make(out, run=QUIET)
    assert artifact.content == made.content and not (out / "state").exists()
    artifact.verify()


@pytest.mark.slow
def test_killed_at_five_random_durable_steps(run_killed, made, source, tmp_path):
    """Each kill hits a run from its start, at a step of its own fifth of them."""
    num_steps = run_killed(tmp_path / "whole", source, 0, "").result
    assert num_steps > 50
    draw = random.Random(num_steps)
    for fifth, where in enumerate(("before", "after", "before", "after", "before")):
        kill_at = draw.randint(fifth * num_steps // 5 + 1, (fifth + 1) * num_steps // 5)
        out = tmp_path / f"data-{kill_at}"
        assert run_killed(out, source, kill_at, where).returncode == -signal.SIGKILL
        assert spec_of(source).make(out, run=QUIET).content == made.content, f"killed at step {kill_at} of {num_steps}"


@pytest.mark.slow
def test_input_that_changes_during_an_interruption_is_read_again(run_killed, source, tmp_path):
    changing = tmp_path / "source"
    changing.mkdir()
    (changing / "rows.jsonl").write_bytes((source / "rows.jsonl").read_bytes())
    moments = (6, 30)
    for kill_at in moments:
        assert run_killed(tmp_path / f"data-{kill_at}", changing, kill_at, "after").returncode == -signal.SIGKILL
    (changing / "more.txt").write_text(story(999))
    fresh = spec_of(changing).make(tmp_path / "fresh", run=QUIET)
    for kill_at in moments:
        assert spec_of(changing).make(tmp_path / f"data-{kill_at}", run=QUIET).content == fresh.content


def test_a_full_disk_is_said_before_the_work(source, tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(FitError, match="of disk, has 1000 B"):
        spec_of(source).make(tmp_path / "out", run=QUIET)


def test_a_finished_artifact_of_changed_input_is_said(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("\n".join(story(i) for i in range(3)))
    spec = spec_of(source, dedups=[])
    made = spec.make(tmp_path / "data-x", run=QUIET)
    assert spec.make(tmp_path / "data-x", run=Run()).content == made.content
    assert "has changed" not in capsys.readouterr().err
    (source / "b.txt").write_text(story(7))
    assert spec.make(tmp_path / "data-x", run=Run()).content == made.content
    assert "has changed since data-x was made; make it again with --redo=data-x" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_edited_in_place_is_said(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("\n".join(story(i) for i in range(3)))
    spec = spec_of(source, dedups=[])
    made = spec.make(tmp_path / "data-x", run=Run())
    assert "may have changed" not in capsys.readouterr().err
    (source / "a.txt").write_text((source / "a.txt").read_text()[::-1])
    os.utime(source / "a.txt", ns=(1, 1))
    assert spec.make(tmp_path / "data-x", run=Run()).content == made.content
    assert "may have changed since data-x was made" in capsys.readouterr().err
    assert spec.make(tmp_path / "data-y", run=QUIET).content != made.content


@pytest.mark.slow
def test_a_file_edited_in_place_during_an_interruption_is_read_again(run_killed, source, tmp_path, capsys):
    changing = tmp_path / "source"
    changing.mkdir()
    (changing / "rows.jsonl").write_bytes((source / "rows.jsonl").read_bytes())
    moments = (6, 30)
    for kill_at in moments:
        assert run_killed(tmp_path / f"data-{kill_at}", changing, kill_at, "after").returncode == -signal.SIGKILL
    content = (changing / "rows.jsonl").read_text()
    (changing / "rows.jsonl").write_text(content.replace("the", "eht"))
    os.utime(changing / "rows.jsonl", ns=(1, 1))
    fresh = spec_of(changing).make(tmp_path / "fresh", run=QUIET)
    for kill_at in moments:
        artifact = spec_of(changing).make(tmp_path / f"data-{kill_at}", run=Run())
        assert "may have changed since this stage was interrupted; starting it again" in capsys.readouterr().err
        assert artifact.content == fresh.content


@pytest.mark.slow
def test_limits_and_splits(source, tmp_path):
    small = spec_of(source, max_bytes=20_000, validation_fraction=0.0).make(tmp_path / "small", run=QUIET)
    assert small.figures["input_bytes"].value <= 20_000 and small.figures["val_tokens"].value == 0
    packed = PackedTokens(small.folder, "val")
    assert packed.num_tokens == 0 and list(packed.documents()) == []
    half = spec_of(source, validation_fraction=0.5).make(tmp_path / "half", run=QUIET)
    share = half.figures["val_tokens"].value / (half.figures["val_tokens"].value + half.figures["train_tokens"].value)
    assert 0.25 < share < 0.75


def test_an_own_rule_and_a_taken_tokenizer(made, source, tmp_path):
    changes = {
        "filters": [{"kind": "expression", "keep": "words < 500 and kind == 'prose'", "reason": "own"}],
        "dedups": [],
        "tokenizer": {"path": str(made.folder)},
    }
    artifact = spec_of(source, **changes).make(tmp_path / "out", run=QUIET)
    stats = json.loads((artifact.folder / "stats.json").read_text())
    assert set(stats["steps"][1]["reasons"]) == {"own"} and len(stats["steps"]) == 2
    assert (artifact.folder / "tokenizer.json").read_bytes() == (made.folder / "tokenizer.json").read_bytes()
    assert [row["slot"] for row in artifact.techniques] == ["filter"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filters": [{"kind": "length", "min_bytes": 10**9}]}, "filter 'length' dropped all .* 'too_short'"),
        ({"filters": [{"kind": "expression", "keep": "wrods > 3"}]}, "did you mean 'words'"),
        (
            {"text_field": "body", "source": "rows.jsonl"},
            "without a document in them .*no_text_field.*\n.*set text_field",
        ),
        ({"source": "bad.txt"}, "wrong_encoding.*\n.*set encoding"),
        ({"languages": ["xx-nothing"]}, "unknown languages"),
        ({"max_bytes": 1}, "larger than max_bytes"),
        ({"source": "nowhere"}, "there is no such file"),
        ({"tokenizer": {"path": "/nonexistent"}}, "has no tokenizer.json"),
    ],
)
def test_mistakes(source, tmp_path, changes, message):
    if "source" in changes:
        changes = {**changes, "source": str(source / changes["source"])}
    with pytest.raises((SpecError, ArtifactError), match=f"(?s){message}"):
        spec_of(source, **changes).make(tmp_path / "out", run=QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"filters": ["gopher"]}, "did you mean 'gopher_quality'|unknown filter 'gopher'"),
        ({"dedups": ["minhsh"]}, "did you mean 'minhash'"),
        ({"sauce": "x"}, "did you mean 'source'"),
        ({"filters": [{"kind": "length", "min_byte": 3}]}, "min_byte"),
        ({"filters": [{"kind": "expression", "keep": "import os"}]}, "is not an expression"),
        ({"tokenizer": {"vocab_size": 3}}, "vocab_size"),
        ({"encoding": "klingon-8"}, "not an encoding of Python"),
    ],
)
def test_wrong_specs(values, message):
    with pytest.raises(SpecError, match=message):
        Data.read(values)


def test_a_missing_extra_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pyarrow.*\n.*hone-llm\[data\]"):
        spec_of(source).make(tmp_path / "out", run=QUIET)


def test_the_spec_is_small_light_and_prints_exactly(tmp_path):
    import yaml

    spec = Data()
    assert Data.read(yaml.safe_load(spec.to_yaml())) == spec and len(Data.model_fields) <= 22
    assert spec.override({"filters.0.min_bytes": "7"}).filters[0].min_bytes == 7
    check = "import sys, hone.data.stage as s; s.Data(); print({'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert "torch" not in out and "pyarrow" not in out


def test_several_sources(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(story(len(name) + ord(name[0]), 300))
    spec = spec_of(tmp_path, source=[str(tmp_path / "one"), str(tmp_path / "two")], filters=[], dedups=[])
    made = spec.make(tmp_path / "out", run=QUIET)
    assert made.figures["kept_documents"].value == 2
    assert set(json.loads((made.folder / "stats.json").read_text())["sources"]) == {"one/", "two/"}
    with pytest.raises(SpecError, match="is inside its own source"):
        spec.make(tmp_path / "two" / "out", run=QUIET)


def test_the_output_may_not_lie_in_its_own_source(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(SpecError, match="is inside its own source"):
        Data(source=str(tmp_path)).make(tmp_path / "work" / "data-a", run=Run(quiet=True))
    assert not (tmp_path / "work").exists()
    with pytest.raises(SpecError, match=r"Data\.source"):
        Data.read({"source": ""})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_fields_that_no_row_has_are_said(tmp_path, capsys, kind):
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    rows = [{"text": story(number), "link": f"https://example.org/{number}", "rare": None} for number in range(40)]
    rows[30]["rare"] = 'a "licence": b'
    if kind == "jsonl":
        (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "a.parquet")
    spec = {"url_field": "lnk", "metadata_fields": ["rare", "licence"], "dedups": []}
    made = spec_of(tmp_path / "in", **spec).make(tmp_path / "wrong")
    warnings = json.loads((made.folder / "stats.json").read_text())["warnings"]
    printed = capsys.readouterr()
    for said in ("metadata_fields 'licence' has a value in none of", "url_field 'lnk' has a value in none of"):
        assert any(warning.startswith(said) for warning in warnings) and f"note: {said}" in printed.out + printed.err
    assert not any("rare" in warning for warning in warnings)
    right = {"url_field": "link", "metadata_fields": ["rare"], "dedups": []}
    made = spec_of(tmp_path / "in", **right).make(tmp_path / "right", run=QUIET)
    assert not any("no row" in said for said in json.loads((made.folder / "stats.json").read_text())["warnings"])
