"""A signal is one function and one line of the table, a filter one file and one line: both are added here and run through `hone data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow.parquet as parquet
import pytest
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data import FILTERS
from hone.data.filters.base import Filter, Rule
from hone.data.filters.decide import redecide
from hone.data.signals import SIGNALS, Signal
from hone.data.stage import Data
from hone.text.batch import Texts
from tests.data.stories import story


def questions(texts: Texts, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Question marks per word."""
    marks = np.concatenate([[0], np.cumsum(texts.data == ord("?"))])
    return (marks[texts.offsets[1:]] - marks[texts.offsets[:-1]]) / np.maximum(columns["words"], 1)


class Quiz(Filter):
    """Drops lists of questions."""

    paper: ClassVar[str] = ""
    max_questions: float = Field(0.1, description="Most question marks per word.")

    def rules(self) -> list[Rule]:
        return [Rule("asks", f"questions <= {self.max_questions}")]


@pytest.fixture
def added(monkeypatch) -> None:
    monkeypatch.setitem(SIGNALS, "questions", Signal("float64", "tests.data.test_new_signal:questions"))
    monkeypatch.setitem(FILTERS.rows, "quiz", "tests.data.test_new_signal:Quiz")


def write(folder: Path) -> Path:
    texts = [story(number) for number in range(20)] + ["Who? What? When? Where? Why? How? " * 5] * 2
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "rows.jsonl"


def test_a_signal_and_a_filter_are_added_by_a_line_each(added, tmp_path):
    spec = Data.read(
        {"source": str(write(tmp_path)), "filters": ["quiz"], "dedups": [], "tokenizer": {"vocab_size": 300}}
    )
    made = spec.make(tmp_path / "out", run=Run(quiet=True))
    (row,) = [row for row in json.loads((made.folder / "stats.json").read_text())["steps"] if row["slot"] == "filter"]
    assert row["name"] == "quiz" and row["reasons"]["asks"]["documents"] == 2
    columns = parquet.read_table(made.folder / "signals").to_pydict()
    assert [value > 0.1 for value in columns["questions"]] == [reason == "asks" for reason in columns["reason"]]
    again = redecide(made.folder, [{"kind": "quiz", "max_questions": 2}])  # decided again without reading a text
    assert again.counts["back"]["documents"] == 2
    other = {"kind": "expression", "keep": "questions == 0"}  # and a column for every expression
    assert redecide(made.folder, [other]).counts["gone"]["documents"] == 0


def test_without_the_line_there_is_no_such_column(tmp_path):
    wrong = {"kind": "expression", "keep": "questions == 0", "when": "True"}
    with pytest.raises(SpecError, match="no signal column 'questions'"):
        Data.read({"source": str(write(tmp_path)), "filters": [wrong]}).make(tmp_path / "out", run=Run(quiet=True))
