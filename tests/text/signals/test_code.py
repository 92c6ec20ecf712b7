"""Rows of tables that are code: told apart by their lines, spared by rules for prose, counted and said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hone.base.run import Run
from hone.data.signals import signals_of
from hone.data.stage import Data
from hone.text.batch import Texts
from hone.text.normalize import normalize
from hone.text.signals.code import looks_like_code
from tests.data.stories import story

C = """#include <stdio.h>

int main(void) {
    for (int i = 0; i < 3; i++) {
        printf("%d\\n", i);
    }
    return 0;
}
"""
SQL = (
    "CREATE TABLE users (\n  id INTEGER,\n  name TEXT\n);\nINSERT INTO users VALUES (1, 'a');\nSELECT *\nFROM users;\n"
)
SHELL = '#!/bin/sh\nset -e\nfor file in *.txt; do\n  echo "$file"\n  out="${file%.txt}.md"\ndone\n'
JAVASCRIPT = "const a = [1, 2];\nfunction f(x) {\n  return x.map((y) => y + 1);\n}\nconsole.log(f(a));\n"
PYTHON = """import json
from pathlib import Path


def read(path: Path) -> dict:
    '''The rows of a file.'''
    with open(path) as file:
        return {row["id"]: row for row in map(json.loads, file)}
"""
PROSE = {
    "verse": "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake the darling buds of May,\n"
    "And summer's lease hath all too short a date;\n",
    "list": "Shopping:\n- milk (two bottles)\n- bread, butter\n- eggs\n- tea; coffee\n",
    "play": "HAMLET:\nTo be, or not to be: that is the question;\n\nOPHELIA:\nGood my lord,\nHow does your honour for this many a day?\n",
    "mail": "From: a@example.org\nTo: b@example.org\nSubject: Meeting on Monday\n\nDear all,\n\nwe meet at 10:00 (room 3).\n\nBest,\nAnn\n",
    "table": "Year, Goals, Games\n2001, 3, 12\n2002, 5, 14\n2003, 8, 15\n",
    "recipe": "Ingredients:\n2 cups of flour (sifted)\n1/2 tsp. salt\n\nMix the flour with the salt, then add water.\n",
    "short": "x = 1",
}  # fmt: skip


def said(texts: list[str]) -> np.ndarray:
    batch = Texts.of([normalize(text) for text in texts])
    return looks_like_code(batch, signals_of(batch))


def test_code_is_told_from_prose() -> None:
    assert said([C, SQL, SHELL, JAVASCRIPT, PYTHON]).all()
    assert not said([*PROSE.values(), story(1)]).any()
    assert said([]).shape == (0,)


def test_real_code_and_real_prose(shared_data: Path) -> None:
    from benchmarks.data.code_rows import labelled

    found = {name: said(texts[:600]) for name, texts in labelled(shared_data).items()}
    for name, least in {"Python": 0.9, "Rust": 0.95, "C": 1.0}.items():
        assert found[name].mean() >= least, name
    for name, most in {
        "English prose": 0.002,
        "75 other languages": 0.002,
        "text messages": 0.002,
        "exam questions (MMLU)": 0.01,
    }.items():
        assert found[name].mean() <= most, name


@pytest.mark.slow
def test_rows_of_code_get_the_rules_of_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every kind of table, but not in files whose names say what they are."""
    source = tmp_path / "source"
    source.mkdir()
    functions = [one for text in (C, SQL, SHELL, PYTHON) for one in (text * 3, text * 5)]
    texts = [story(number) for number in range(30)] + functions
    (source / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (source / "rows.json").write_text(json.dumps([{"text": "int a = 1;\n" + text} for text in functions]))
    (source / "code.txt").write_text(C * 4)
    spec = {"source": str(source), "tokenizer": {"vocab_size": 400}, "dedups": [], "filters": ["gopher_quality"]}
    made = Data.read(spec).make(tmp_path / "made", run=Run())
    stats = json.loads((made.folder / "stats.json").read_text())
    assert stats["steps"][0]["rows_of_code"] == 16
    assert stats["languages"]["code"]["documents"] == 16
    printed = capsys.readouterr()
    assert "16 of 47 documents are rows that look like code" in printed.out + printed.err
    assert stats["steps"][1]["documents_out"] == 46, "the text file is prose by its name, and no prose"


@pytest.mark.slow
def test_a_source_that_loses_much_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    (source / "bad").mkdir(parents=True)
    (source / "good.jsonl").write_text("".join(json.dumps({"text": story(number)}) + "\n" for number in range(40)))
    rows = ["too few words"] * 3 + ["12 34 56 78 " * 20] * 6 + [story(number) for number in range(50, 61)]
    (source / "bad" / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    spec = {
        "source": str(source),
        "tokenizer": {"vocab_size": 400},
        "dedups": [],
        "filters": ["length", "gopher_quality"],
    }
    made = Data.read(spec).make(tmp_path / "made", run=Run())
    (warning,) = (
        one
        for one in json.loads((made.folder / "stats.json").read_text())["warnings"]
        if "drop" in one and "documents of" in one
    )
    assert warning.startswith("filters drop 9 of 20 documents of bad/ (45%), ")
    assert "6 by gopher_quality: too_few_alphabetic_words" in warning or "6 by gopher_quality: short_words" in warning
    assert "3 by length: too_short" in warning and "good" not in warning
    assert "--filters.1.when=\"(kind != 'code') and group != 'bad/'\"" in warning
    printed = capsys.readouterr()
    assert f"note: {warning}"[:60] in " ".join((printed.out + printed.err).split())
    changed = {
        **spec,
        "filters": [
            {"kind": "length", "when": "group != 'bad/'"},
            {"kind": "gopher_quality", "when": "(kind != 'code') and group != 'bad/'"},
        ],
    }
    again = Data.read(changed).make(tmp_path / "again", run=Run(quiet=True))
    assert again.figures["kept_documents"].value == 60
