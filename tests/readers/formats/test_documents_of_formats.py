"""PDF, DOCX, ODT and EPUB: what comes out of files written by hand and by other libraries, and of broken ones."""

from __future__ import annotations

import io

import pytest

from tests.readers.formats.made import docx, epub, odt, pdf, zipped
from tests.readers.formats.written import put, reasons, texts

LEFT = [f"the left column has line {n} of its long" for n in range(8)]
RIGHT = [f"while the right one shows its own line {n}" for n in range(8)]


def test_pdf_lines_become_paragraphs(tmp_path):
    pytest.importorskip("pypdfium2")
    lines = ["The first line of a paragraph", "goes on here.", "Another one begins", "and ends."]
    page = [(60.0, 700.0 - 12 * n, line) for n, line in enumerate(lines)]
    path = put(tmp_path / "a.pdf", pdf([page, [(60.0, 700.0, "Page two \\(with brackets\\).")]]))
    assert texts(path) == [
        "The first line of a paragraph goes on here.\nAnother one begins and ends.\n\nPage two (with brackets)."
    ]
    assert texts(put(tmp_path / "paper", path.read_bytes())) == texts(path)


@pytest.mark.parametrize("by_rows", [False, True])
def test_pdf_columns_are_read_one_after_the_other(tmp_path, by_rows):
    pytest.importorskip("pypdfium2")
    left = [(50.0, 600.0 - 14 * n, text) for n, text in enumerate(LEFT)]
    right = [(320.0, 600.0 - 14 * n, text) for n, text in enumerate(RIGHT)]
    columns = [line for pair in zip(left, right) for line in pair] if by_rows else left + right
    title = (80.0, 700.0, "A title that is wide enough to reach over both of the columns of this page here")
    foot = (80.0, 300.0, "The text below the columns is as wide as the title of the page and follows them")
    (text,) = texts(put(tmp_path / "a.pdf", pdf([[title, *columns, foot]], size=12)))
    words = " ".join(text.split())
    assert words == " ".join([title[2], *LEFT, *RIGHT, foot[2]])


def test_pdf_tables_stay_in_rows(tmp_path):
    pytest.importorskip("pypdfium2")
    cells = [(x, 600.0 - 14 * n, f"{word}{n}") for n in range(8) for x, word in ((60.0, "a"), (400.0, "b"))]
    (text,) = texts(put(tmp_path / "a.pdf", pdf([cells])))
    assert text.split() == [cell[2] for cell in cells]


def test_pdf_running_titles_are_left_out(tmp_path):
    pytest.importorskip("pypdfium2")
    pages = [
        [
            (60.0, 780.0, "THE BOOK OF THINGS"),
            (60.0, 600.0, f"Chapter {'xvi' * n} has its text."),
            (300.0, 20.0, f"{n}"),
        ]
        for n in range(1, 6)
    ]
    (text,) = texts(put(tmp_path / "a.pdf", pdf(pages)))
    assert text.split("\n\n") == [f"Chapter {'xvi' * n} has its text." for n in range(1, 6)]


def test_odd_pdf_files(tmp_path):
    pytest.importorskip("pypdfium2")
    assert reasons(put(tmp_path / "a.pdf", pdf([[], []]))) == ["no_text_layer"]
    assert reasons(put(tmp_path / "a.pdf", b"%PDF-1.4\nnothing at all")) == ["bad_pdf"]
    assert reasons(put(tmp_path / "a.pdf", b"")) == ["bad_pdf"]
    whole = pdf([[(60.0, 700.0, "words")]] * 3)
    for size in range(20, len(whole), 97):
        found = put(tmp_path / "cut.pdf", whole[:size])
        assert set(texts(found)) <= {"words\nwords\nwords", "words\nwords", "words"}


def test_without_pdfium_the_package_is_named(tmp_path, monkeypatch):
    import sys

    from hone.base.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(MissingExtra, match="pypdfium2"):
        texts(put(tmp_path / "a.pdf", pdf([[(60.0, 700.0, "x")]])))


P = "<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>"


def test_docx(tmp_path):
    cell = "<w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc>"
    rows = "".join(f"<w:tr>{cell.format(a)}{cell.format(b)}</w:tr>" for a, b in (("one", "two"), ("three", "four")))
    body = (
        P.format("First &amp; foremost")
        + "<w:p><w:r><w:t>with</w:t><w:tab/><w:t>tab</w:t><w:br/><w:t xml:space='preserve'> and break</w:t></w:r>"
        "<w:del><w:r><w:delText>gone</w:delText><w:t>gone too</w:t></w:r></w:del><w:r><w:instrText>PAGE</w:instrText></w:r></w:p>"
        f"<w:tbl>{rows}</w:tbl>" + P.format("Last")
    )
    path = put(tmp_path / "a.docx", docx(body, footnotes=P.format("A note")))
    assert texts(path) == ["First & foremost\nwith\ttab\n and break\none\ttwo\nthree\tfour\nLast\n\nA note"]
    assert texts(put(tmp_path / "none", path.read_bytes())) == texts(path)
    long = put(tmp_path / "long.docx", docx("".join(P.format(f"paragraph {n}") for n in range(2000))))
    assert max(map(len, texts(long, max_document_chars=5000))) <= 5000 and len(texts(long, max_document_chars=5000)) > 4


def test_odt(tmp_path):
    body = (
        "<text:tracked-changes><text:p>gone</text:p></text:tracked-changes><text:h>A heading</text:h>"
        "<text:p>Some<text:s text:c='3'/>space<text:tab/>tab<text:note><text:note-citation>1</text:note-citation>"
        "<text:note-body><text:p>The note</text:p></text:note-body></text:note> <text:span>and more</text:span></text:p>"
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p></table:table-cell>"
        "<table:table-cell><text:p>b</text:p></table:table-cell></table:table-row></table:table>"
    )
    path = put(tmp_path / "a.odt", odt(body))
    assert texts(path) == ["A heading\nSome   space\ttab and more\na\tb\nThe note"]
    assert texts(put(tmp_path / "none", path.read_bytes())) == texts(path)
    locked = zipped({"META-INF/manifest.xml": "<manifest><encryption-data/></manifest>", "content.xml": b"\x01\x02"})
    assert reasons(put(tmp_path / "b.odt", locked)) == ["encrypted"]


def test_epub(tmp_path):
    book = {
        "b": "<h1>Two</h1><p>The second&nbsp;chapter.</p>",
        "a": "<h1>One</h1><p>The first chapter.</p><script>no()</script>",
    }
    path = put(tmp_path / "a.epub", epub(book, ["a", "b"]))
    (text,) = texts(path)
    assert [line.replace("\xa0", " ") for line in text.split("\n") if line] == [
        "One",
        "The first chapter.",
        "Two",
        "The second chapter.",
    ]
    assert texts(put(tmp_path / "none", path.read_bytes())) == [text]
    assert reasons(put(tmp_path / "b.epub", zipped({"mimetype": "application/epub+zip"}))) == ["bad_epub"]


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize("name", ["a.docx", "a.odt", "a.epub"])
def test_garbage_and_bombs(tmp_path, name, monkeypatch):
    from hone.readers.formats import containers, office

    inner = {"a.docx": "word/document.xml", "a.odt": "content.xml", "a.epub": "META-INF/container.xml"}[name]
    path = tmp_path / name
    assert reasons(put(path, b"no document")) == ["bad_zip"]
    assert reasons(put(path, zipped({"other": "x"}))) == [f"bad_{name[2:]}"]
    assert reasons(put(path, zipped({inner: "<a><b>"}))) == ["bad_xml"]
    assert reasons(put(path, zipped({inner: f"{BOMB}<a>&b;</a>"}))) == ["entities_declared"]
    assert reasons(put(path, zipped({inner: "<a>" * 100_000}))) == ["nested_too_deeply"]
    monkeypatch.setattr(office, "MAX_PART_BYTES", 1 << 20)
    monkeypatch.setattr(office, "MAX_CHAPTER_BYTES", 1 << 20)
    assert reasons(put(path, zipped({inner: b"<a>" + b" " * (8 << 20)}))) == ["too_large"]
    monkeypatch.setattr(containers, "FREE_BYTES", 1 << 16)
    assert reasons(put(path, zipped({inner: b"<a>" + b" " * (1 << 19)}))) == ["expands_too_much"]


def test_documents_of_other_writers(tmp_path):
    writer = pytest.importorskip("docx")
    document = writer.Document()
    document.add_heading("A heading", 1)
    document.add_paragraph("A paragraph with ").add_run("bold").bold = True
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    document.save(str(tmp_path / "a.docx"))
    assert texts(tmp_path / "a.docx") == ["A heading\nA paragraph with bold\nleft\tright"]


def test_odt_of_another_writer(tmp_path):
    opendocument = pytest.importorskip("odf.opendocument")
    from odf.text import H, P

    document = opendocument.OpenDocumentText()
    document.text.addElement(H(outlinelevel=1, text="A heading"))
    document.text.addElement(P(text="A paragraph & more"))
    out = io.BytesIO()
    document.write(out)
    assert texts(put(tmp_path / "a.odt", out.getvalue())) == ["A heading\nA paragraph & more"]
