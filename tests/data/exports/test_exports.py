"""Exports hold what the stage's own tables hold: every dropped document with its rule, kept ones as JSONL and for `datasets`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
import zstandard
from pyarrow import parquet

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.data.stage import Data
from tests.data.stories import story


def lines(folder: Path) -> list[dict]:
    rows = []
    for path in sorted(folder.glob("*.jsonl.zst")):
        with open(path, "rb") as raw:
            text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf8")
            rows += [json.loads(line) for line in text]
    return rows


def spec(folder: Path, **changes) -> Data:
    return Data.read(
        {
            "source": str(folder / "in"),
            "tokenizer": {"vocab_size": 300},
            "filters": [{"kind": "length", "min_bytes": 300}, {"kind": "gopher_quality", "min_words": 60}],
            "metadata_fields": ["date"],
            "export": {"dropped": True, "jsonl": True, "hugging_face": True},
            "validation_fraction": 0.2,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("exports")
    (folder / "in").mkdir()
    for name in ("a", "b"):  # two shards
        texts = [story(ord(name) * 50 + number, 1500) for number in range(12)]
        texts += [
            "too short \u00e9",
            "word " * 10 + "and " * 70,
            story(ord(name) * 50, 1500) + " With an end.",
            texts[3],
        ]
        rows = [json.dumps({"text": text, "date": f"202{number % 5}"}) for number, text in enumerate(texts)]
        (folder / "in" / f"{name}.jsonl").write_text("\n".join(rows))
    return spec(folder).make(folder / "out", run=Run(quiet=True))


def test_dropped_documents_are_there_in_full_with_their_rule(made):
    stats = json.loads((made.folder / "stats.json").read_text())
    rows = lines(made.folder / "dropped")
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        counts[row["step"], row["reason"]] = counts.get((row["step"], row["reason"]), 0) + 1
    told = {
        (step["name"], reason): row["documents"]
        for step in stats["steps"][1:]
        for reason, row in step["reasons"].items()
    }
    assert counts == told and len(told) >= 4
    short = [row for row in rows if row["reason"] == "too_short"]
    assert [row["text"] for row in short] == ["too short \u00e9"] * 2 and short[0]["metadata"] == {"date": "2022"}
    assert short[0]["rule"] == "bytes >= 300" and short[0]["value"] == {"bytes": 12}
    near = [row for row in rows if row["step"] == "minhash"]
    kept = {row["id"]: row for row in lines(made.folder / "jsonl")}
    assert near and all(row["cluster"] in kept and row["cluster_size"] > 1 and row["rule"] is None for row in near)
    others = [row for row in rows if row["step"] == "gopher_quality"]
    assert others and all(row["rule"] and row["value"] for row in others)


def test_jsonl_is_the_table_of_kept_documents(made):
    table = parquet.read_table(made.folder / "documents").to_pylist()
    rows = lines(made.folder / "jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in table]
    for row, other in zip(rows, table):
        assert row["text"] == other["text"] and row["metadata"] == json.loads(other["metadata"])
        assert row.keys() == other.keys() and row["words"] == other["words"]


def test_the_card_describes_the_files(made):
    home = made.folder / "hugging_face"
    text = (home / "README.md").read_text(encoding="utf8")
    head = yaml.safe_load(text.split("---\n")[1])
    info = head["dataset_info"]
    counts = {row["name"]: row["num_examples"] for row in info["splits"]}
    table = parquet.read_table(made.folder / "documents")
    names = [{"train": "train", "val": "validation"}[name] for name in table.column("split").to_pylist()]
    assert counts == {name: names.count(name) for name in ("train", "validation")}
    assert {row["name"] for row in info["features"]} == set(table.column_names) - {"split"}
    assert "# out" in text and "| minhash | dedup |" in text and head["language"] == ["en"]


def test_the_folder_loads_with_the_library_datasets(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset(str(made.folder / "hugging_face"), cache_dir=str(tmp_path))
    table = {row["id"]: row for row in parquet.read_table(made.folder / "documents").to_pylist()}
    assert set(data) == {"train", "validation"}
    found = {row["id"]: (split, row) for split in data for row in data[split]}
    assert found.keys() == table.keys()
    for ident, (split, row) in found.items():
        assert {"train": "train", "val": "validation"}[table[ident]["split"]] == split
        assert row == {name: value for name, value in table[ident].items() if name != "split"}
    assert data["train"].features["words"].dtype == "int64" and data["train"].features["cluster"].dtype == "string"


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_workers(made, tmp_path):
    folder = made.folder.parent
    run = Run(quiet=True, executor={"kind": "processes", "workers": 2})
    other = spec(folder).make(tmp_path / "out", run=run)
    for name in ("dropped", "jsonl", "hugging_face"):
        for path in sorted((made.folder / name).rglob("*.*")):
            assert path.read_bytes() == (other.folder / path.relative_to(made.folder)).read_bytes()
