"""What the page shows of groups, scores, evaluation examples and mixtures, and that it shows nothing that was not written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base.durable import write_atomic
from hone.report import markdown, page
from hone.report.collect import Line, Row, collect
from hone.report.sections import curation
from hone.report.sections.curation import Curation
from hone.report.sections.mixtures import Mixtures
from tests.report.lines import LineMaker
from tests.report.markup import Walk

SHARES = [
    {
        "source": "books",
        "tokens": 31_000,
        "wanted": 0.5,
        "weight": 0.31,
        "epochs": 4.0,
        "capped": True,
        "utility": 0.83,
        "reason": "as much as it helps; held at the cap of 4 epochs",
    },
    {
        "source": "code",
        "tokens": 910_000,
        "wanted": 0.5,
        "weight": 0.69,
        "epochs": 0.3,
        "capped": False,
        "utility": None,
        "reason": "what was left",
    },
]


def row_of(**content: Any) -> Row:
    files = {"stats": "stats.json", "hits": "contamination.jsonl", "mixture": "mixture.json"}
    return Row("data-a", "data", "a", "f", {}, {}, [], {}, {}, 0, {files[key]: value for key, value in content.items()})


def test_a_filter_that_silences_a_group_is_seen(whole: Path) -> None:
    table = Curation.of(collect(whole).of("data")[0]).groups[0]
    assert table.title == "source" and [row.name for row in table.rows] == ["python", "docstrings"]
    python, docstrings = table.rows
    assert docstrings.silenced and not python.silenced
    assert (python.dropped, docstrings.dropped) == ("1.0 %", "57 %")
    assert docstrings.far == ["rules: too few words 55 % (rest 1.0 %)"] and python.far == []
    assert table.words == ["rules: too few words takes 55 % of docstrings, 1.0 % of the rest"]
    walk = Walk(page.render(collect(whole)))
    assert "Drop rates by source" in walk.text and table.words[0] in walk.text
    assert "| docstrings | rules: too few words 55 % (rest 1.0 %) | 2,100 | 57 % | 0.320 |" in markdown.render(
        collect(whole)
    )


@pytest.mark.parametrize(
    ("count", "size", "other", "rest", "far"),
    [
        (50, 100, 10, 1000, True),
        (50, 100, 400, 1000, False),  # a quarter more is not twice
        (4, 4, 0, 1000, False),  # too few to say
        (6, 8, 300, 1000, False),  # chance does that
        (60, 1000, 25, 1000, False),  # twice, but of little
        (100, 100, 0, 0, False),  # no rest
        (0, 100, 0, 100, False),
    ],
)
def test_what_stands_out(count: float, size: float, other: float, rest: float, far: bool) -> None:
    assert curation.stands_out(count, size, other, rest) is far


def test_many_groups_are_cut_but_not_those_that_stand_out() -> None:
    groups = {f"g{n}": {"documents": 1000 - n, "dropped": {"a: b": 10}, "scores": {}} for n in range(20)}
    groups["small"] = {"documents": 50, "dropped": {"a: b": 45}, "scores": {}}
    (table,) = Curation.of(row_of(stats={"groups": {"language": groups}})).groups
    assert [row.name for row in table.rows] == [*(f"g{n}" for n in range(12)), "small"] and table.more == 8


def test_one_group_without_scores_is_no_table() -> None:
    groups = {"en": {"documents": 10, "dropped": {"a: b": 3}, "scores": {}}}
    assert Curation.of(row_of(stats={"groups": {"language": groups}})).groups == []


def test_scorers_say_what_held_out_texts_said(whole: Path) -> None:
    lexicon, cascade = Curation.of(collect(whole).of("data")[0]).scorers
    assert (lexicon.quality, lexicon.learned, lexicon.dear) == ("", "entries of lists 412", "")
    assert cascade.quality == "cheap: area under the curve 0.934, accuracy 0.871"
    assert (cascade.learned, cascade.dear) == ("cheap: held out 240", "18.7 %")


def test_evaluation_examples_that_were_found(whole: Path) -> None:
    (step,) = Curation.of(collect(whole).of("data")[0]).contamination
    assert step.sets == [("gsm8k", "1,319", "19", "13", "1.0 %", "7")] and step.looked == "4,001"
    assert len(step.examples) == 10 and step.more == 3
    assert step.examples[0].words == "in 13 documents" and "Natalia" in step.examples[0].text
    walk = Walk(page.render(collect(whole)))
    assert "Natalia sold clips to 48 of her friends" in walk.text
    assert "contamination.jsonl has 3 more" in walk.text


def test_packing_and_files_of_other_kinds() -> None:
    stats = {
        "packing": {"256": {"stream": {"rows": 8108, "waste": 0.00028, "parted": 459}, "best_fit": {"rows": None}}},
        "steps": [{"name": "read", "skipped": {f".k{n}": n + 1 for n in range(8)}}],
    }
    found = Curation.of(row_of(stats=stats))
    assert found.packing == [("256", "stream", "8,108", "0.028 %", "459")]
    assert found.skipped == "8 .k7, 7 .k6, 6 .k5, 5 .k4, 4 .k3, 3 .k2 and 2 kinds more"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two seeds of one mixture and one of another."""
    line = LineMaker(tmp_path / "line")
    for name, kind, weight in (("a-0", "utilimax", 0.31), ("a-1", "utilimax", 0.31), ("b-0", "fixed", 0.5)):
        draft = line.begin("train", name, {"mixture": {"kind": kind}, "seed": int(name[-1])})
        shares = [{**SHARES[0], "weight": weight}, SHARES[1]]
        notes = {"loss": [1, 2]} if kind == "fixed" else {}
        write_atomic(draft.folder / "mixture.json", json.dumps({"shares": shares, "notes": notes}).encode())
        draft.record("epochs_books", 3.98, "epochs")
        draft.record("val_loss_books", 4.25, "nats/token")
        line.finish(draft, time_s=1.0, memory=1e6)
    return line.folder


def test_trainings_with_the_same_shares_stand_together(mixed: Path) -> None:
    one, other = Mixtures.of(collect(mixed)).mixtures
    assert (one.kind, one.runs, one.notes) == ("utilimax", ["train-a-0", "train-a-1"], None)
    assert (other.kind, other.runs, other.notes) == ("fixed", ["train-b-0"], {"loss": [1, 2]})
    books, code = one.shares
    assert (books.wanted, books.weight, books.epochs, books.loss) == ("50.0 %", "31.0 %", "3.98", "4.25")
    assert books.reason.endswith("held at the cap of 4 epochs") and books.utility == "0.830"
    assert (code.epochs, code.loss, code.utility) == ("0.300", "", "")
    walk = Walk(page.render(collect(mixed)))
    assert "utilimax: train-a-0, train-a-1" in walk.text and "A gray bar is limited by the cap." in walk.text
    assert ("href", "#mixture") in walk.attributes
    assert "## Mixture utilimax: `train-a-0`, `train-a-1`" in markdown.render(collect(mixed))


def test_without_these_files_nothing_is_shown(copy) -> None:
    folder = copy()
    (folder / "data-corpus" / "contamination.jsonl").unlink()
    stats = json.loads((folder / "data-corpus" / "stats.json").read_text())
    for key in ("groups", "scorers", "packing"):
        del stats[key]
    for step in stats["steps"]:
        step.pop("figures", None)
    (folder / "data-corpus" / "stats.json").write_text(json.dumps(stats))
    walk = Walk(page.render(collect(folder)))
    for words in (
        "Drop rates",
        "Evaluation examples",
        "Mixture",
        "Sent to the expensive scorer",
        "Sequences of the training text",
    ):
        assert words not in walk.text
    assert "Reasons for dropping, with samples" in walk.text


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["documents", "dropped", "scores", "group", "language", "evaluations", "figures", "hit", "skipped",
                         "examples", "too_short", "256", "stream", "rows", "waste", "parted", "shares", "weight", "x"]),
        inner, max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from(["groups", "scorers", "packing", "steps"]), ANYTHING),
    st.lists(st.dictionaries(st.sampled_from(["step", "documents", "samples"]), ANYTHING), max_size=3),
)
def test_nonsense_in_the_files_is_passed_over(stats: dict[str, Any], hits: list[dict[str, Any]]) -> None:
    Curation.of(row_of(stats=stats, hits=hits))


@given(st.dictionaries(st.sampled_from(["shares", "notes"]), ANYTHING))
def test_nonsense_in_a_mixture_is_passed_over(mixture: dict[str, Any]) -> None:
    row = row_of(mixture=mixture)
    row.kind = "train"
    Mixtures.of(Line("line", Path(), [row], []))
