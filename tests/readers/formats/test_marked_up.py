"""XML, MediaWiki dumps, notebooks, TeX and mail."""

from __future__ import annotations

import bz2
import json
import mailbox
from email.message import EmailMessage

import pytest

from hone.readers.documents import Document
from hone.readers.formats.markup import body
from hone.readers.formats.wikitext import cleaned
from tests.readers.formats.written import items, noted, put, reasons, texts

WIKI = """{{Infobox river | name = Example {{nested|x}} | length = 5}}
[[File:River.jpg|thumb|A [[river]] with {{convert|3|km}} a caption]]
The '''Example''' is a ''long'' [[river (geography)|river]] in [[Germany]].<ref name="a">A [http://x.org ref]</ref><ref name="b" />
It has {{formatnum:12}}banks&nbsp;and<!-- hidden --> [http://example.org two ends] &amp; one [[Bank (shore)#Left|left bank]].

== History ==
{| class="wikitable"
! Year !! Event
|-
| 1900 || Flood {{x}}
|}
=== Early ===
* First item
* Second [[item]]

== See also ==

== References ==
{{reflist}}
[[Category:Rivers]]
[[de:Beispiel]]
"""
PROSE = """The Example is a long river in Germany.
It has banks and two ends & one left bank.

History

Early
First item
Second item"""


def test_wikitext():
    assert cleaned(WIKI).replace("\xa0", " ") == PROSE
    assert cleaned("a {{ b [[c]] d") == "a  b c d".replace("  ", " ")
    assert cleaned("a }} b ]] c |} d") == "a b c d"  # brackets without a partner go alone
    assert cleaned("<nowiki>'''[[as it is]]'''</nowiki> ''and'' <math>x < y</math>not") == "'''[[as it is]]''' and not"
    assert (
        cleaned("[[Datei:Bild.png|mini|Text]] [[ファイル:絵.jpg|thumb|絵]]東京は[[日本]]の首都。")
        == "東京は日本の首都。"
    )
    assert cleaned("[[Star Wars: Episode I]] and [[Category:X]]") == "Star Wars: Episode I and"
    assert cleaned("{{" * 50_000 + "x") and cleaned("[[" * 50_000 + "x" + "]]" * 50_000) is not None


REDIRECT = '<redirect title="x"/>'


def dump(*pages: tuple[str, int, str, bool]) -> str:
    rows = "".join(
        f"<page><title>{title}</title><ns>{ns}</ns><id>{n}</id>{REDIRECT * redirect}"
        f"<revision><id>99</id><timestamp>2020</timestamp><text xml:space='preserve'>{text}</text></revision></page>"
        for n, (title, ns, text, redirect) in enumerate(pages)
    )
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><sitename>W</sitename></siteinfo>{rows}</mediawiki>'


@pytest.mark.parametrize("name", ["a.xml", "a.xml.bz2", "a"])
def test_mediawiki(tmp_path, name):
    raw = dump(
        ("One", 0, "'''One''' is &lt;b&gt;first&lt;/b&gt;.", False),
        ("Talk", 1, "chatter", False),
        ("Uno", 0, "#REDIRECT [[One]]", True),
        ("Two", 0, "Two is [[One|second]].", False),
    ).encode()
    path = put(tmp_path / name, bz2.compress(raw) if name.endswith("bz2") else raw)
    found = [item for item in items(path, metadata_fields=("title", "id")) if isinstance(item, Document)]
    assert [item.text for item in found] == ["One is first.", "Two is second."]
    assert json.loads(found[1].metadata) == {"title": "Two", "id": "3"}
    assert noted(path) == {"MediaWiki namespace 1": 1, "MediaWiki redirect": 1}
    cut = put(tmp_path / "cut.xml", raw[:-300])
    assert texts(cut)[:1] == ["One is first."] and reasons(cut) == ["bad_xml"]


def test_other_xml(tmp_path):
    path = put(
        tmp_path / "a.xml", "<doc><head>Title</head><p>A <b>bold</b> word &amp; &#228;.</p>\n<p>More\n text</p></doc>"
    )
    assert texts(path) == ["Title\nA bold word & ä.\nMore text"]
    rows = (
        "<docs><doc><id>1</id><text>first <i>one</i></text></doc><doc><text><p>second</p><p>two</p></text></doc></docs>"
    )
    path = put(tmp_path / "b.xml", rows)
    assert texts(path) == ["first one", "second\ntwo"]
    assert texts(path, text_field="id") == ["1"]
    assert reasons(put(tmp_path / "c.xml", "no xml")) == ["bad_xml"]
    assert reasons(put(tmp_path / "c.xml", b"")) == ["bad_xml"]
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><x>&b;</x>'
    assert reasons(put(tmp_path / "c.xml", bomb)) == ["entities_declared"]
    assert texts(put(tmp_path / "d.xml", '<!DOCTYPE x SYSTEM "http://example.org/x.dtd"><x>plain</x>')) == ["plain"]
    secret = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'
    assert reasons(put(tmp_path / "c.xml", secret)) == ["entities_declared"]
    assert "nested_too_deeply" in reasons(put(tmp_path / "c.xml", "<a>" * 5000))


def test_notebooks(tmp_path):
    book = {
        "nbformat": 4,
        "metadata": {"language_info": {"name": "python"}},
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "Some text."]},
            {"cell_type": "code", "source": "x = 1\nprint(x)", "outputs": [{"text": ["1"]}]},
            {"cell_type": "code", "source": []},
        ],
    }
    path = put(tmp_path / "a.ipynb", json.dumps(book))
    assert texts(path) == ["# Title\nSome text.\n\n```python\nx = 1\nprint(x)\n```"]
    assert texts(put(tmp_path / "none", json.dumps(book))) == texts(path)
    old = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": "y = 2"}]}]}
    assert texts(put(tmp_path / "b.ipynb", json.dumps(old))) == ["```\ny = 2\n```"]
    for bad in ("{", "[]", '{"cells": 1}', "[" * 200_000):
        assert reasons(put(tmp_path / "c.ipynb", bad)) == ["bad_notebook"]


def test_tex(tmp_path):
    source = r"""% a comment
\documentclass{article}
\newcommand{\model}{Our \textbf{Model}}
\def\R{\mathbb{R}}
\begin{document}
\maketitle
\section{Start} % not this
\model{} has 50\% of $x \in \R$ and \Reals.
\begin{comment}
gone
\end{comment}
It ends\cite{a}.\label{sec:x}
\begin{thebibliography}{9}\bibitem{a} A\end{thebibliography}
\end{document}
after
"""
    wanted = (
        "\\section{Start} \nOur \\textbf{Model}{} has 50\\% of $x \\in \\mathbb{R}$ and \\Reals.\n\nIt ends\\cite{a}."
    )
    assert body(source) == wanted
    assert texts(put(tmp_path / "a.tex", source)) == [wanted.replace(" \n", "\n")]
    assert body("plain \\TeX\\ words") == "plain \\TeX\\ words"
    assert reasons(put(tmp_path / "b.tex", "café".encode("latin-1"))) == ["wrong_encoding"]
    assert texts(put(tmp_path / "b.tex", "café".encode("latin-1")), encoding="auto") == ["café"]


def message(subject: str, text: str, page: str = "") -> EmailMessage:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = "me@example.org", "you@example.org", subject
    made.set_content(text)
    if page:
        made.add_alternative(page, subtype="html")
    return made


def test_mail(tmp_path):
    made = message("Grüße aus Köln", "Dear you,\nall is well.\n", "<p>Dear <b>you</b></p>")
    made.add_attachment(b"\0\1", maintype="application", subtype="octet-stream", filename="x.bin")
    path = put(tmp_path / "a.eml", bytes(made))
    assert texts(path) == ["Grüße aus Köln\n\nDear you,\nall is well."] and noted(path) == {"attachment .bin": 1}
    page = "<html><body><article><p>Only a page, but a long one with words.</p></article></body></html>"
    only = EmailMessage()
    only["Subject"] = "Page"
    only.set_content(page, subtype="html")
    assert texts(put(tmp_path / "b.eml", bytes(only))) == ["Page\n\nOnly a page, but a long one with words."]
    assert reasons(put(tmp_path / "c.eml", b"\0\xff\0 garbage")) == ["bad_message"]
    box = mailbox.mbox(tmp_path / "a.mbox")
    for n in range(3):
        box.add(mailbox.mboxMessage(message(f"Number {n}", f"Body {n}\n\nFrom here on\nmore")))
    box.flush()
    box.close()
    found = texts(tmp_path / "a.mbox")
    assert found == [f"Number {n}\n\nBody {n}\n\nFrom here on\nmore" for n in range(3)]
    assert texts(put(tmp_path / "none", (tmp_path / "a.mbox").read_bytes())) == found
    assert reasons(put(tmp_path / "b.mbox", "no mailbox")) == ["bad_mbox"]
