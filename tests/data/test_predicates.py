"""Predicates over URLs and texts against plain Python, their errors, and the URL filter in the stage."""

from __future__ import annotations

import gzip
import json
import re
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.data import FILTERS
from hone.data.expression import evaluate, files_of
from hone.data.stage import Data

URLS = [
    "https://www.bad.example.com/a/b?x=1", "http://user:pw@Sub.BAD.example.com:8080/", "notbad.example.com/adult/page.html", "https://good.org",
    "", "ftp://good.org/poker-casino/Free_Casino", "https://example.com./x", "//cdn.good.org/adultery", "https://good.org/adult/page.html#top",
]  # fmt: skip


def columns(urls=URLS) -> dict[str, np.ndarray]:
    return {"url": np.array(urls, object), "words": np.arange(len(urls)), "text": np.array(urls, object)}


def holds(text: str, urls=URLS) -> list[bool]:
    return evaluate(text, columns(urls)).tolist()


def test_domains_cover_those_below_them(tmp_path):
    path = tmp_path / "domains.txt"
    path.write_text("# blocked\n0.0.0.0 bad.example.com\n\nexample.com  # the whole\nCDN.good.org\n")
    blocked = ("bad.example.com", "example.com", "cdn.good.org")

    def expected(url: str) -> bool:
        host = (urlsplit(url if "//" in url else f"//{url}").hostname or "").rstrip(".")
        return any(host == one or host.endswith(f".{one}") for one in blocked)

    assert holds(f"domain(url) in file('{path}')") == [expected(url) for url in URLS]
    assert holds(f"domain(url) not in file('{path}') and words < 5") == [
        not expected(url) and number < 5 for number, url in enumerate(URLS)
    ]
    assert files_of(f"words > 1 and domain(url) in file('{path}')") == [str(path)]


def test_pages_cover_those_below_them(tmp_path):
    path = tmp_path / "urls.gz"
    path.write_bytes(gzip.compress(b"https://www.good.org/adult/\nbad.example.com/a\n"))
    assert [url for url, hit in zip(URLS, holds(f"page(url) in file('{path}')")) if hit] == [URLS[0], URLS[8]]
    assert not any(holds(f"url in file('{path}')"))


def test_words_and_subwords(tmp_path):
    path = tmp_path / "soft.txt"
    path.write_text("free\npoker\nslots\n")
    counts = [len({"free", "poker", "slots", "casino"} & set(re.split(r"[\W_]+", url.lower()))) for url in URLS]
    for most in range(4):
        assert holds(f"words_in(url, file('{path}'), 'casino') > {most}") == [count > most for count in counts]
    assert holds("subwords_in(url, 'adultp', 'badex') > 0") == [
        "adultp" in re.sub(r"\W", "", u) or "badex" in re.sub(r"\W", "", u.lower()) for u in URLS
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab.Äß/ ", max_size=12), min_size=1, max_size=8), st.text("ab.Ä/", min_size=1, max_size=3))
def test_contains_and_matches_are_those_of_python(texts, word):
    quoted = word.replace("'", "")
    assert holds(f"contains(url, '{quoted}')", texts) == [quoted in text for text in texts]
    assert holds("matches(url, '^a+b?[.]')", texts) == [bool(re.search("^a+b?[.]", text)) for text in texts]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matches(url, '(a')", r"regular expression '\(a' is not valid: missing"),
        ("matches(url, '(?=a)b')", "not valid"),
        ("matches(url, 'a{20000}')", "not valid"),
        (f"matches(url, '{'a' * 10_001}')", "longer than 10000 characters"),
        ("matches(words, 'a')", "'words' is a number"),
        ("matches(url)", "does not take these arguments"),
        ("contains(url, 3)", "does not take these arguments"),
        ("domain(url, 'x')", "does not take these arguments"),
        ("domain(url)", "is text, not true or false"),
        ("open(url)", "no function of expressions"),
        ("words in file('x')", "'words' is a number"),
        ("url in file('no/such/list')", "no/such/list"),
    ],
)
def test_misuse_is_said(text, message):
    with pytest.raises(SpecError, match=message):
        evaluate(text, columns())


def test_a_bad_expression_is_refused_with_the_recipe():
    with pytest.raises(SpecError, match=r"'\[a' is not valid"):
        FILTERS.read({"kind": "expression", "keep": "not matches(text, '[a')"})
    with pytest.raises(SpecError, match="no file /dev/null/none"):
        evaluate("domain(url) in file('/dev/null/none')", columns())


def test_nested_repeats_end():
    """An engine that backtracks would need longer than the universe is old."""
    assert holds("matches(url, '(a+)+$')", ["a" * 100_000 + "b"]) == [False]


def test_filters_read_lists_urls_and_texts_in_the_stage(tmp_path):
    (tmp_path / "list.txt").write_text("spam.org\n")
    prose = (
        "The garden behind the house had been left to itself, number {n}, for many years, and nobody could say who planted it. "
        * 3
    )
    rows = [
        {"text": prose.format(n=n), "url": f"https://{'a.spam.org' if n % 4 == 0 else 'fine.net'}/{n}"}
        for n in range(24)
    ]
    rows[1]["text"] += " SECRET WORD"
    rows[3]["url"] = "https://fine.net/free-poker-casino"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Data(
        source=str(tmp_path / "in.jsonl"),
        filters=[
            {"kind": "url", "domains": [str(tmp_path / "list.txt")], "soft_banned_words": ["poker", "casino"]},
            {"kind": "expression", "keep": "not contains(text, 'SECRET WORD')", "reason": "said"},
        ],
        dedups=[],
        tokenizer={"vocab_size": 300},
    )
    assert [str(path) for path in spec.files().values()] == [str(tmp_path / "list.txt")]
    made = spec.make(tmp_path / "out")
    steps = json.loads((made.folder / "stats.json").read_text())["steps"]
    reasons = {reason: row["documents"] for step in steps for reason, row in step["reasons"].items()}
    assert reasons == {"domain": 6, "soft_words": 1, "said": 1}
