"""Line edits of C4 and RefinedWeb against plain Python, and against datatrove where it is installed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.data import EDITS, FILTERS
from hone.data.edits.page_lines import C4Lines, RefinedWebLines
from tests.data.edits.memory import Memory
from tests.data.test_filters import PROSE, columns_of

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
EDGE = r"[^\w\x80-\U0010ffff]*"
THING = "likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|views|followers"
COUNTER = re.compile(rf"{EDGE}[0-9][0-9,.]*[kmb]?\s+(?:{THING}){EDGE}", re.IGNORECASE)
PIECES = st.sampled_from(
    ["The owl slept.", "we use Cookies here.", "JavaScript", "is off", "[1]", "[edit]", "[x]", "HOME", "ABOUT US", "3 likes", "1.2K views!",
     "12", "٣٤", "…", "...", " ", "\u3000", "Straße", "ÄÖÜ", "a" * 1001, "sign-in now", "Read more...", "two items in cart", "“quoted”", '"'],
)  # fmt: skip
TEXTS = st.lists(st.lists(PIECES, max_size=5).map(" ".join), max_size=8).map("\n".join)


def c4(text: str, spec: C4Lines) -> list[str]:
    """The lines that are left, without white space around."""
    left = []
    for line in map(str.strip, text.split("\n")):
        words = line.split()
        if any(len(word) > spec.max_word_length for word in words):
            continue
        line = CITATION.sub("", line) if spec.remove_citations else line
        ends = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
        if (spec.filter_no_terminal_punct and not ends) or len(words) < spec.min_words_per_line:
            continue
        if "javascript" in line.lower() or any(phrase in line.lower() for phrase in PHRASES):
            continue
        left.append(line)
    return left


def refinedweb(text: str) -> list[str]:
    left = []
    for line in map(str.strip, text.split("\n")):
        if not line:
            continue
        capitals, digits = sum(char.isupper() for char in line), sum(char.isnumeric() for char in line)
        if (
            capitals > 0.5 * len(line)
            or digits >= 0.999999 * len(line)
            or COUNTER.fullmatch(line)
            or len(line.split()) == 1
        ):
            continue
        if len(line.split()) <= 10:
            line = re.sub(r"^sign-in|read more\.\.\.$|items in cart", "", line, flags=re.IGNORECASE)
        left.append(line)
    return left


def full(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip()]


def edited(spec, texts: list[str], tmp_path, **columns) -> tuple[list[str], dict]:
    corpus = Memory(texts, borders=(len(texts),))
    corpus.columns |= {"language": np.full(len(texts), "en"), **columns}
    cuts = spec.cuts(corpus, np.ones(len(texts), bool), tmp_path)
    return corpus.after(cuts), spec.figures(corpus, cuts, tmp_path)


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, max_size=4), marks=st.booleans(), cite=st.booleans())
def test_c4_lines_are_those_of_plain_python(tmp_path_factory, texts, marks, cite):
    spec = C4Lines(filter_no_terminal_punct=marks, remove_citations=cite, min_left_bytes=0)
    left, _ = edited(spec, texts, tmp_path_factory.mktemp("state"))
    assert [full(text.split("\n")) for text in left] == [full(c4(text, spec)) for text in texts]


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, max_size=4))
def test_refinedweb_lines_are_those_of_plain_python(tmp_path_factory, texts):
    left, _ = edited(RefinedWebLines(min_left_bytes=0), texts, tmp_path_factory.mktemp("state"))
    assert [full(text.split("\n")) for text in left] == [full(refinedweb(text)) for text in texts]


def test_c4_agrees_with_datatrove(tmp_path):
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter

    texts = [
        f"Home\n{PROSE}\nWe use cookies on this page.[2]\nPlease turn on JavaScript now.\nThe end came.[1]\n12 days"
    ]
    peer = C4QualityFilter(min_num_sentences=-1)
    for text, left in zip(texts, edited(C4Lines(), texts, tmp_path)[0]):
        document = Document(text=text, id="0")
        assert peer.filter(document)
        assert full(left.split("\n")) == document.text.split("\n")


def test_notices_are_cut_and_pages_stay(tmp_path):
    page = f"{PROSE}\nThis site uses cookies to make your visit better.\nRead our privacy policy before you go on.\nNavigation"
    assert FILTERS.read("c4").decide(columns_of(page))[1][0] == ""
    strict = FILTERS.read({"kind": "c4", "max_policy_lines": 0.1})
    assert strict.decide(columns_of(page))[1][0] == "policy"
    left, figures = edited(C4Lines(), [page, PROSE], tmp_path)
    assert left == [PROSE, PROSE]
    assert {name: row["spans"] for name, row in figures["rules"].items() if row["spans"]} == {
        "no_terminal_punct": 1,
        "policy": 2,
    }
    assert figures["rules"]["policy"]["documents"] == 1
    assert figures["lines"] == PROSE.count("\n") * 2 + 2 + 3


def test_lines_of_each_rule_are_counted(tmp_path):
    text = f"SHOP AND SALE\n2024\n\n3 likes\nHome\nSign-in to see your orders\n{PROSE}\nAll of it is here. Read more...\nLOG OUT"
    left, figures = edited(RefinedWebLines(), [text], tmp_path)
    assert left == [f"\n to see your orders\n{PROSE}\nAll of it is here."]
    found = {name: row["spans"] for name, row in figures["rules"].items()}
    assert found == {"uppercase": 2, "numeric": 1, "counter": 1, "one_word": 1, "phrase": 2}


def test_code_and_unspaced_scripts_stay_whole(tmp_path):
    columns = {"kind": np.array(["code", "prose"]), "language": np.array(["en", "ja"])}
    texts = ["import os\nreturn", "吾輩は猫である。\n名前はまだ無い。"]
    for name in ("c4_lines", "refinedweb_lines"):
        state = tmp_path / name
        state.mkdir()
        assert edited(EDITS.read(name), texts, state, **columns)[0] == texts


def test_a_senseless_condition_is_refused():
    with pytest.raises(SpecError, match="language"):
        EDITS.read({"kind": "c4_lines", "when": "language == 5"})
