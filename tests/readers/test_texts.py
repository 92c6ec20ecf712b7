"""Texts: a bad byte costs the document it stands in, an unknown encoding is found out where it shows, long texts take linear time."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from hone.feed.files.listing import list_source
from hone.readers import texts as texts_module
from hone.readers.documents import Broken, Document, Options
from hone.readers.read import read_file

MARK = b"<|endoftext|>"
HEADER = "The Project Gutenberg eBook of a book. It is for the use of anyone anywhere.\n" * 220  # 17 kB of plain ASCII


def read(path: Path, content: bytes, **options) -> tuple[list[Document], list[Broken]]:
    path.write_bytes(content)
    items = [item for file in list_source(str(path)).files for item in read_file(file, Options(**options))]
    return [item for item in items if isinstance(item, Document)], [item for item in items if isinstance(item, Broken)]


def strings(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


@pytest.mark.parametrize("chunk", [32, 100, 1 << 20])
def test_a_bad_byte_costs_its_document_alone(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(texts_module, "_CHUNK_BYTES", chunk, raising=False)
    good = [f"document {number}, which holds é and 語" for number in range(200)]
    raw = [text.encode() for text in good]
    whole, _ = read(tmp_path / "a.txt", MARK.join(raw))
    bad = {
        0: b"\xff" + raw[0],
        70: raw[70] + b"\xe8\xaa",
        71: raw[71][:10] + b"\x80" + raw[71][10:],
        199: raw[199] + b"\xc3",
    }
    content = MARK.join(bad.get(number, text) for number, text in enumerate(raw))
    documents, broken = read(tmp_path / "a.txt", content)
    assert documents == [document for number, document in enumerate(whole) if number not in bad]
    assert [(item.reason, item.num_bytes) for item in broken] == [
        ("wrong_encoding", len(text)) for _, text in sorted(bad.items())
    ]
    assert broken[2].text.startswith("document 7\ufffd1, which")
    total = sum(len(text.encode()) for text in strings(documents)) + sum(item.num_bytes for item in broken)
    assert total == len(content) - 199 * len(MARK)


def test_a_bad_byte_in_a_long_book_costs_one_of_its_pieces(tmp_path):
    book = "\n\n".join(f"paragraph {number} of a long book, très long" for number in range(100_000)).encode()
    whole, _ = read(tmp_path / "a.txt", book)
    at = book.index(b"paragraph 60000 ")
    documents, (broken,) = read(tmp_path / "a.txt", book[:at] + b"\xff" + book[at + 1 :])
    lost = [document for document in whole if document not in documents]
    assert len(whole) > 9 and len(lost) == 1 and len(documents) == len(whole) - 1
    assert broken.reason == "wrong_encoding" and abs(broken.num_bytes - len(lost[0].text.encode())) < 9


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-be", "utf-32", "gb18030", "shift_jis", "cp1252", "cp037", "iso2022_jp"]
)
@pytest.mark.parametrize("chunk", [30, 1 << 20])
def test_documents_in_any_encoding(tmp_path, monkeypatch, encoding, chunk):
    monkeypatch.setattr(texts_module, "_CHUNK_BYTES", chunk, raising=False)
    word = {"gb18030": "道可道，非常道", "cp1252": "Grüße", "cp037": "Grüße"}.get(encoding, "吾輩は猫である")
    wanted = [f"{word} {number}\r\nnext <|end" for number in range(40)]
    raw = "<|endoftext|>".join(wanted).encode(encoding)
    documents, broken = read(tmp_path / "a.txt", raw, encoding=encoding)
    assert strings(documents) == [text.replace("\r", "") for text in wanted] and not broken
    if encoding == "utf-16":  # half a pair
        mark = MARK.decode().encode("utf-16-le")
        raw = raw.replace(mark, b"\x00\xd8" + mark, 1)
        documents, (broken,) = read(tmp_path / "a.txt", raw)
        assert strings(documents) == [text.replace("\r", "") for text in wanted[1:]]
        assert (broken.reason, broken.num_bytes) == ("wrong_encoding", 2 * len(wanted[0]) + 2)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_of_a_text_that_breaks_off_what_was_read_is_kept(tmp_path, ending):
    import zstandard

    draw = random.Random(0)
    wanted = [f"document {number} of {draw.random()}, é" for number in range(30_000)]
    content = MARK.join(text.encode() for text in wanted)
    packed = gzip.compress(content) if ending == ".gz" else zstandard.compress(content)
    documents, (broken,) = read(tmp_path / f"a.txt{ending}", packed[: len(packed) // 2])
    *before, last = strings(documents)
    assert before == wanted[: len(before)] and len(before) > 10_000 and wanted[len(before)].startswith(last)
    assert (broken.reason, broken.num_bytes) == ("truncated", 0)


@pytest.mark.parametrize("encoding", ["auto", "cp1252"])
def test_of_a_text_in_another_encoding_that_breaks_off_all_is_kept(tmp_path, encoding):
    """The one that is found out waits for more bytes before it decides; here none come."""
    draw = random.Random(1)
    text = "\n".join(f"Überall, très {draw.random()}, naïve Façade" for _ in range(800))
    packed = gzip.compress(text.encode("cp1252"))
    documents, (broken,) = read(tmp_path / "a.txt.gz", packed[: len(packed) // 2], encoding=encoding)
    (kept,) = strings(documents)
    assert text.startswith(kept) and len(kept) > len(text) / 3
    assert broken.reason == "truncated"


def test_a_letter_that_was_cut_in_two_is_left_out(tmp_path):
    text = "".join(chr(0x4E00 + random.Random(number).randrange(5000)) for number in range(4000))
    packed = gzip.compress(text.encode(), 0)  # stored, so that every byte before the end can be read
    for end in range(len(packed) // 2, len(packed) // 2 + 3):
        documents, _ = read(tmp_path / "a.txt.gz", packed[:end])
        assert text.startswith(strings(documents)[0]) and len(strings(documents)[0]) > 1000


def test_what_ends_a_file_early_costs_what_was_not_read(tmp_path, monkeypatch):
    content = MARK.join(b"document %d" % number for number in range(200_000))
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    (file,) = list_source(str(path)).files

    class Failing:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def read1(self, size):
            if self.stream.tell() >= 1 << 20:
                raise OSError(5, "Input/output error")
            return self.stream.read1(size)

    monkeypatch.setattr(texts_module, "open_stream", lambda file: Failing(open(file.path, "rb")))
    *documents, broken = read_file(file, Options())
    num_read = sum(len(document.text) for document in documents)
    assert broken.reason == "unreadable" and len(documents) > 30_000
    assert broken.num_bytes == len(content) - num_read


TEXTS = {
    "latin-1": "Le café était déjà fermé, mais les élèves attendaient près de l'école où l'été finissait. ",
    "cp1252": "“Die Mädchen” hörten über die Straße hinweg schöne Lieder – während es kälter wurde. ",
    "cp1251": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. ",
    "koi8-r": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. ",
    "koi8-u": "Усі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом. ",
    "iso8859-2": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw, żółć i gęś. ",
    "iso8859-7": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. ",
    "shift_jis": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "euc_jp": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "gb18030": "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。",
    "big5": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心。",
    "cp949": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ",
}


@pytest.mark.parametrize("chunk", [1 << 12, 17_000, 1 << 20])
@pytest.mark.parametrize("encoding", TEXTS)
def test_an_encoding_that_shows_late_is_found(tmp_path, monkeypatch, encoding, chunk):
    monkeypatch.setattr(texts_module, "_CHUNK_BYTES", chunk, raising=False)
    text = HEADER + "\n".join(f"{number} {TEXTS[encoding]}" for number in range(3000))
    documents, broken = read(tmp_path / "a.txt", text.encode(encoding), encoding="auto", max_document_chars=100_000)
    assert not broken and len(documents) > 1
    assert "\n".join(strings(documents)) == text.strip().replace(" \n", "\n")


def test_every_document_of_a_dump_has_its_own_encoding(tmp_path):
    wanted = [
        HEADER * (number % 2) + "\n".join(f"{line} {text}".rstrip() for line in range(40))
        for number, text in enumerate(TEXTS.values())
    ]
    raw = [text.encode(name) for name, text in zip(TEXTS, wanted)]
    raw += ["plain UTF-8, é and 語".encode(), "one é in Latin-1".encode("latin-1")]
    documents, broken = read(tmp_path / "a.txt", MARK.join(raw), encoding="auto")
    assert not broken and strings(documents) == [*wanted, "plain UTF-8, é and 語", "one é in Latin-1"]


def test_few_letters_are_read_as_the_rest_of_the_file(tmp_path):
    long, short = 20 * TEXTS["cp1251"], "Да, это был он"
    raw = [
        long.encode("cp1251"),
        *[f"{short} {number}".encode("cp1251") for number in range(50)],
        "£1 and Ä".encode("latin-1"),
    ]
    documents, _ = read(tmp_path / "a.txt", MARK.join(raw), encoding="auto")
    assert strings(documents)[1:51] == [f"{short} {number}" for number in range(50)]


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path):
    text = (HEADER + TEXTS["koi8-r"] * 50).encode()
    documents, (broken,) = read(tmp_path / "a.txt", text[:-40] + b"\xff" + text[-40:] + MARK + b"fine", encoding="auto")
    assert strings(documents) == ["fine"] and (broken.reason, broken.num_bytes) == ("wrong_encoding", len(text) + 1)


def test_code_with_a_long_header_is_decoded_too(tmp_path):
    text = "// a comment in English\n" * 900 + "// Größe, Länge und Höhe\nint size;\n"
    documents, broken = read(tmp_path / "a.c", text.encode("latin-1"), encoding="auto")
    assert not broken and "Größe, Länge" in documents[0].text


@pytest.mark.slow
@pytest.mark.parametrize("most", [1000, 70_000, 1 << 30])
def test_texts_are_cut_the_same_whatever_the_chunks(tmp_path, monkeypatch, most):
    draw = random.Random(most)
    text = "".join(draw.choice(["word ", "\n", "\n\n", "\r\n", "é", "x" * 300, "<|endoftext|>"]) for _ in range(30_000))
    found = []
    for chunk in (97, 4096, 1 << 20):
        monkeypatch.setattr(texts_module, "_CHUNK_BYTES", chunk, raising=False)
        found.append(read(tmp_path / "a.txt", text.encode(), max_document_chars=most))
    assert found[0] == found[1] == found[2] and len(found[0][0]) > 100


def test_a_long_document_is_put_together_once(tmp_path, monkeypatch):
    """The work is counted in characters that are searched for a place to cut, not timed."""
    monkeypatch.setattr(texts_module, "_CHUNK_BYTES", 1 << 12)
    seen = []
    whole = texts_module._Documents.add

    def counted(self, raw, ends):
        before = self._texts
        yield from whole(self, raw, ends)
        seen.append(len(self._texts[0]) if self._texts and self._texts is not before else 0)

    monkeypatch.setattr(texts_module._Documents, "add", counted)
    content = b"a line of text\n" * 70_000
    documents, _ = read(tmp_path / "a.txt", content, max_document_chars=400_000)
    assert len(documents) == 3 and sum(map(bool, seen)) <= 4
