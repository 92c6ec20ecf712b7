"""Extractors: main text of 181 pages against what people marked as the article, and what they leave out."""

from __future__ import annotations

import pytest

from benchmarks.data.pages import gold, score
from hone.base.errors import MissingExtra, SpecError
from hone.feed.files.streams import Unreadable
from hone.readers import EXTRACTORS
from hone.readers.encodings import decode_page, decode_text
from hone.readers.pages import Careful, Fast, page_text, tidied


def test_the_metric():
    assert score({"a": "one two three four five"}, {"a": "one two three four five"}) == (1, 1, 1)
    f1, precision, recall = score({"a": "x one two three four"}, {"a": "one two three four five"})
    assert (precision, recall, f1) == (0.5, 0.5, 0.5)
    assert score({"a": "", "b": "a b c d"}, {"a": "", "b": "a b c d"})[0] == 1


@pytest.mark.parametrize(("extractor", "least"), [(Fast(), 0.955), (Careful(), 0.955)], ids=["fast", "careful"])
def test_main_text_of_gold_pages(shared_data, extractor, least):
    pages, articles = gold(shared_data)
    assert len(pages) == 181
    f1, precision, recall = score({name: page_text(raw, extractor) for name, raw in pages.items()}, articles)
    assert f1 >= least and precision > 0.93 and recall > 0.97


def test_what_the_fast_extractor_adds_is_worth_it(shared_data):
    pages, articles = gold(shared_data)

    def f1(extractor):
        return score({name: page_text(raw, extractor) for name, raw in pages.items()}, articles)[0]

    plain, boxed, whole = f1(Fast(boxes=(), tidy=False)), f1(Fast(tidy=False)), f1(Fast())
    assert plain + 0.005 < boxed < boxed + 0.002 < whole


WORDS = "Reading is to the mind what exercise is to the body, and a good book never says all at once. " * 4


@pytest.mark.parametrize("name", EXTRACTORS)
def test_scripts_menus_and_footers_are_no_text(name):
    page = (
        "<html><head><title>t</title><script>alert('script')</script><style>p {}</style></head><body>"
        "<nav><ul><li><a href='/'>Home</a></li><li><a href='/x'>Products</a></li></ul></nav>"
        f"<article><p>{WORDS}</p><p>{WORDS.upper()}</p><div class='share-buttons'><p>Tell your friends about it.</p></div></article>"
        "<footer><p>Imprint and privacy</p></footer></body></html>"
    )
    text = EXTRACTORS.read(name).extract(page)
    assert WORDS.strip() in text and WORDS.upper().strip() in text
    for word in ("script", "Products", "Imprint"):
        assert word not in text


def test_an_article_in_a_box_is_found_all_the_same():
    page = f"<html><body class='has-related share-page'><main><p>{WORDS}</p></main></body></html>"
    assert WORDS.strip() in Fast().extract(page)


def test_options_of_the_fast_extractor():
    page = f"<html><body><article><h1>The headline of it all</h1><p>{WORDS}</p></article></body></html>"
    assert "headline" in Fast(headline=True).extract(page) and "headline" not in Fast().extract(page)


def test_tidied():
    text = f"Advertisement\n{WORDS}\nShare this article\n{WORDS}\nHome\n\nAbout us\nContact"
    assert tidied(text) == f"{WORDS}\n{WORDS}"
    poem = "roses are red\nviolets are blue\nsugar is sweet"
    assert tidied(poem) == poem  # all of it short, so none of it a menu
    assert tidied("") == ""


@pytest.mark.parametrize("name", EXTRACTORS)
@pytest.mark.parametrize("page", ["", "   ", "no tags", "<", "<html>", "<p>" * 3000, "\0", "<html></html>" * 3])
def test_odd_pages_never_break(name, page):
    assert isinstance(EXTRACTORS.read(name).extract(page), str)


@pytest.mark.parametrize("package", ["resiliparse", "trafilatura"])
def test_absent_packages_are_named(monkeypatch, package):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=package):
        page_text(b"<p>x</p>", Fast() if package == "resiliparse" else Careful())


def test_unknown_extractor():
    with pytest.raises(SpecError, match="did you mean 'fast'"):
        EXTRACTORS.read("fasst")


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "koi8-r", "shift_jis", "gb18030"]
)
def test_pages_that_declare_nothing(encoding):
    text = {
        "koi8-r": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. ",
        "shift_jis": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
        "gb18030": "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。",
    }.get(encoding, "Grüße aus Köln, wo die Straßen schön und die Häuser größer sind. ") * 5
    raw = text.encode(encoding)
    assert decode_page(raw) == text
    assert decode_text(raw, "auto") == text


def test_what_cannot_be_decoded_is_marked():
    raw = b"<meta charset='utf-8'>" + b"plain words, many of them. " * 20 + b"\xff\xfe\xfa\x81\x00"
    assert "plain words" in decode_page(raw, "utf-8")


def nested(tag: str, depth: int, close: bool) -> bytes:
    return (f"<{tag}>" * depth + "A sentence." + (f"</{tag}>" * depth if close else "")).encode()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(("tag", "deep"), [("div", True), ("span", True), ("p", False), ("br", False), ("li", False)])
def test_only_pages_that_nest_too_deeply_are_refused(tag, deep, close):
    assert page_text(nested(tag, 100, close), Fast())
    if not deep:  # the next one ends the one before
        assert page_text(nested(tag, 10_000, close), Fast())
        return
    with pytest.raises(Unreadable, match="nested_too_deeply"):
        page_text(nested(tag, 100_000, close), Fast())


def test_a_page_of_which_little_is_kept_goes_to_the_careful_extractor(monkeypatch):
    paragraphs = [
        f"Paragraph {number} of the article is long enough to be a line of its own. {WORDS}" for number in range(6)
    ]
    boxed = "".join(f"<div class='credit-line'><p>{text}</p></div>" for text in paragraphs)
    page = f"<html><body><article><p>{WORDS * 3}</p>{boxed}</article></body></html>"
    assert paragraphs[3].strip() not in Fast(doubt=0).extract(page)
    assert all(text.strip() in Fast().extract(page) for text in paragraphs)
    whole = f"<html><body><article><p>{WORDS * 3}</p></article></body></html>"
    monkeypatch.setattr(Careful, "extract", lambda self, page: pytest.fail("asked for a page that is whole"))
    assert WORDS.strip() in Fast().extract(whole)
