"""What became of each group: counts against plain loops, and a filter that silences one group is seen in stats.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base.run import Run
from hone.data.corpus import Labels
from hone.data.results import by_group, scorer_rows
from hone.data.stage import Data
from tests.data.stories import story

LABELS = [f"group {number}" for number in range(60)]


def labelled(labels: list[str]) -> Labels:
    names, codes = np.unique(np.array(labels, str), return_inverse=True)
    return Labels(names.tolist(), codes.astype(np.int32))


@given(st.data())
def test_counts_are_those_of_plain_loops(data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.sampled_from(LABELS[:5]), max_size=40))
    causes = [("first", "short"), ("first", "rude"), ("second", "short"), ("second", "short")]
    chosen = st.lists(st.integers(0, len(causes)), min_size=len(labels), max_size=len(labels))
    gone_by = data.draw(chosen)
    scores = data.draw(st.lists(st.floats(0, 1) | st.just(float("nan")), min_size=len(labels), max_size=len(labels)))
    found = by_group(labelled(labels), causes, np.array(gone_by, np.uint16), {"s": np.array(scores)})
    assert {name: row["documents"] for name, row in found.items()} == Counter(labels)
    assert list(found) == sorted(found, key=lambda name: (-found[name]["documents"], name))
    for name, row in found.items():
        lost = Counter(
            ": ".join(causes[cause - 1])
            for label, cause in zip(labels, gone_by, strict=True)
            if label == name and cause
        )
        assert row["dropped"] == lost
        own = [score for label, score in zip(labels, scores, strict=True) if label == name and score == score]
        assert row["scores"] == ({"s": pytest.approx(sum(own) / len(own))} if own else {})
    json.dumps(found, allow_nan=False)


def test_beyond_forty_groups_the_rest_is_one() -> None:
    labels = [label for number, label in enumerate(LABELS) for _ in range(100 - number)]
    gone_by = np.array([label.endswith("9") for label in labels], np.uint16)
    found = by_group(labelled(labels), [("step", "nine")], gone_by, {})
    assert list(found) == [*LABELS[:40], "(other)"]
    assert found["(other)"] == {
        "documents": sum(100 - number for number in range(40, 60)),
        "dropped": {"step: nine": (100 - 49) + (100 - 59)},
        "scores": {},
    }
    assert sum(row["documents"] for row in found.values()) == len(labels)


def test_the_share_of_a_cascades_dear_scorer() -> None:
    rows = [{"name": "cascade", "column": "good"}, {"name": "lexicon", "column": "bad"}]
    found = scorer_rows(
        rows, {"good": np.ones(4), "good_dear": np.array([True, False, False, True]), "bad": np.ones(4)}
    )
    assert found == [{**rows[0], "dear_share": 0.5}, rows[1]]
    assert scorer_rows(rows, {"good_dear": np.empty(0, bool)}) == rows


@pytest.mark.slow
def test_a_filter_that_silences_a_group_is_seen(tmp_path: Path) -> None:
    for group, word in (("press", "the"), ("street", "finna")):
        (tmp_path / "in" / group).mkdir(parents=True)
        for number in range(12):
            text = story(number + 50 * (group == "street")).replace("the", word)
            (tmp_path / "in" / group / f"{number}.txt").write_text(text)
    (tmp_path / "words.txt").write_text("finna\n")
    spec = Data.read(
        {
            "source": str(tmp_path / "in"),
            "tokenizer": {"vocab_size": 300},
            "scorers": [{"kind": "lexicon", "words": [str(tmp_path / "words.txt")]}],
            "filters": [{"kind": "toxicity", "when": "True"}],
            "dedups": [],
        }
    )
    stats = json.loads((spec.make(tmp_path / "out", run=Run(quiet=True)).folder / "stats.json").read_text())
    groups = stats["groups"]["group"]
    assert {name: row["documents"] for name, row in groups.items()} == {"press/": 12, "street/": 12}
    assert groups["street/"]["dropped"] == {"toxicity: toxic_words": 12} and groups["press/"]["dropped"] == {}
    assert groups["street/"]["scores"]["toxic_words"] > 0 == groups["press/"]["scores"]["toxic_words"]
    assert sum(row["documents"] for row in stats["groups"]["language"].values()) == 24
