"""WARC, WET and ARC files, good, odd and broken: what comes out of each, and why the rest does not."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from hone.feed.files.listing import File
from hone.feed.files.streams import head
from hone.readers.archives import MAX_RECORD_BYTES
from hone.readers.documents import Broken, Document, Noted, Options
from hone.readers.read import read_file


def items(path: Path) -> list[Document | Broken]:
    compression = ".zst" if path.suffix == ".zst" else ".gz" if ".gz" in path.name else ""
    return [item for item in everything(path, compression) if not isinstance(item, Noted)]


def everything(path: Path, compression: str = "") -> list[Document | Broken | Noted]:
    return list(read_file(File(path, path.name, path.stat().st_size, "warc", compression), Options()))


def noted(path: Path, compression: str = "") -> dict[str, int]:
    """What is counted and is no page."""
    return dict(Counter(item.what for item in everything(path, compression) if isinstance(item, Noted)))


def read(path: Path) -> tuple[list[str], list[str]]:
    """(texts, reasons of what is broken) of one archive."""
    found = items(path)
    return (
        [item.text for item in found if isinstance(item, Document)],
        [item.reason for item in found if isinstance(item, Broken)],
    )


ARCHIVES = {
    "warcio/example.warc.gz": (1, []),
    "warcio/example-iana.org-chunked.warc": (1, []),  # chunked body with a length
    "warcio/example-bad-non-chunked.warc.gz": (1, []),  # one gzip member for all records
    "warcio/example-bad.warc.gz.bad": (1, []),  # records of a wrong length at its end, none of them a page
    "warcio/example-wrong-chunks.warc.gz": (1, []),  # says it is chunked and is not
    "warcio/example-trunc.warc": (1, ["damaged_record"]),  # a record whose header lost its begin
    "warcio/example.arc.gz": (1, []),
    "IAH-urls-wget.warc.gz": (3, []),  # the crawler's notes on itself are no pages
    "clueweb-quirk.warc.gz": (29, []),  # WARC 0.18, odd dates, says gzip and is plain
    "resiliparse-warcfile.warc.gz": (16, []),
    "whirlwind.warc.gz": (1, []),
    "whirlwind.warc.wet.gz": (1, []),
    "whirlwind.warc.wat.gz": (0, []),  # metadata records only
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_good_and_broken(shared_data, name):
    texts, reasons = read(shared_data / "web" / name)
    assert (len(texts), reasons) == ARCHIVES[name]


def test_every_archive_at_hand_is_tried(shared_data):
    folder = shared_data / "web"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar"}
    assert there == set(ARCHIVES)


def test_pages_come_with_their_address_and_in_their_own_encoding(shared_data):
    (page,) = items(shared_data / "web" / "whirlwind.warc.gz")
    assert page.url == "https://an.wikipedia.org/wiki/Escopete"
    japanese = [item.text for item in items(shared_data / "web" / "clueweb-quirk.warc.gz")]
    assert all("\ufffd" not in text and re.search(r"[\u3040-\u30ff]", text) for text in japanese)  # EUC-JP


def test_warc_and_wet_of_one_page_agree(shared_data):
    (page,), _ = read(shared_data / "web" / "whirlwind.warc.gz")
    (everything,), _ = read(shared_data / "web" / "whirlwind.warc.wet.gz")
    words = set(re.findall(r"\w+", page))
    assert len(words & set(re.findall(r"\w+", everything))) / len(words) > 0.9  # main text is part of all text


def test_arc_and_warc_of_one_page_agree(shared_data):
    folder = shared_data / "web" / "warcio"
    assert read(folder / "example.arc.gz") == read(folder / "example.warc.gz")


def test_an_archive_cut_anywhere_loses_only_its_end_and_says_so(shared_data, tmp_path):
    whole = (shared_data / "web" / "resiliparse-warcfile.warc.gz").read_bytes()
    complete, _ = read(shared_data / "web" / "resiliparse-warcfile.warc.gz")
    plain = gzip.decompress(whole)
    for raw, name in ((whole, "cut.warc.gz"), (plain, "cut.warc")):
        for part in range(1, 24):
            path = tmp_path / name
            path.write_bytes(raw[: len(raw) * part // 24])
            texts, reasons = read(path)
            assert texts == complete[: len(texts)] and reasons == ["truncated"], (name, part)


def test_damage_costs_the_record_it_is_in(shared_data, tmp_path):
    whole = (shared_data / "web" / "resiliparse-warcfile.warc.gz").read_bytes()
    complete, _ = read(shared_data / "web" / "resiliparse-warcfile.warc.gz")
    path = tmp_path / "hole.warc.gz"
    for place in range(300, len(whole), 9000):
        path.write_bytes(whole[:place] + b"?" * 40 + whole[place + 40 :])
        texts, reasons = read(path)
        assert reasons in (["damaged_record"], ["truncated"])
        assert set(texts) <= set(complete) and len(texts) >= len(complete) - 2
        assert reasons == ["damaged_record"] or texts == complete[: len(texts)]


@pytest.mark.parametrize("length", ["4294967296", "99999999999999999999999", "-5", "abc", ""])
@pytest.mark.parametrize("number", [0, 20, 45])
def test_a_header_that_lies_costs_its_record_only(shared_data, tmp_path, length, number):
    plain = gzip.decompress((shared_data / "web" / "resiliparse-warcfile.warc.gz").read_bytes())
    complete, _ = read(shared_data / "web" / "resiliparse-warcfile.warc.gz")
    headers = [match.start() for match in re.finditer(rb"WARC/1", plain)]
    place = plain.find(b"Content-Length: ", headers[number])
    path = tmp_path / "liar.warc"
    path.write_bytes(plain[:place] + b"Content-Length: " + length.encode() + plain[plain.find(b"\r\n", place) :])
    texts, reasons = read(path)
    assert set(texts) <= set(complete) and len(texts) >= len(complete) - 1
    assert reasons in (["damaged_record"], []) and (reasons or length == "")


def test_a_warc_inside_zstd_and_plain(shared_data, tmp_path):
    raw = gzip.decompress((shared_data / "web" / "warcio" / "example.warc.gz").read_bytes())
    expected = read(shared_data / "web" / "warcio" / "example.warc.gz")
    (tmp_path / "a.warc").write_bytes(raw)
    assert read(tmp_path / "a.warc") == expected
    path = tmp_path / "a.warc.zst"
    path.write_bytes(zstandard.compress(raw))
    assert read(path) == expected
    path.write_bytes(zstandard.compress(raw)[:-300])
    assert read(path)[1] == ["truncated"]


def test_all_records_in_one_gzip_member(shared_data, tmp_path):
    plain = gzip.decompress((shared_data / "web" / "resiliparse-warcfile.warc.gz").read_bytes())
    complete, _ = read(shared_data / "web" / "resiliparse-warcfile.warc.gz")
    path = tmp_path / "a.warc.gz"
    whole = gzip.compress(plain)
    path.write_bytes(whole)
    assert read(path) == (complete, [])
    path.write_bytes(whole + whole)
    assert read(path) == (complete * 2, [])
    path.write_bytes(whole[: len(whole) // 2])
    texts, reasons = read(path)
    assert texts == complete[: len(texts)] and len(texts) > 4 and reasons == ["truncated"]


def long_window(content: bytes) -> bytes:
    """A zstd frame of raw blocks that asks for a window of 2 GB (RFC 8878, 3.1.1)."""
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3])
    for begin in range(0, len(content), 100_000):
        block = content[begin : begin + 100_000]
        frame += ((begin + 100_000 >= len(content)) | len(block) << 3).to_bytes(3, "little") + block
    return frame


def test_zstd_with_a_long_window(tmp_path):
    path = tmp_path / "a.warc.zst"
    path.write_bytes(long_window(warc(PAGE.encode(), HTML)))
    assert read(path) == ([SENTENCE], [])
    file = File(path, path.name, path.stat().st_size, "warc", ".zst")
    assert head(file, 1 << 12).startswith(b"WARC/1.0")


def test_of_damaged_zstd_the_records_before_are_kept(tmp_path):
    path = tmp_path / "a.warc.zst"
    frames = [zstandard.compress(warc(PAGE.encode(), HTML)) for _ in range(3)]
    path.write_bytes(b"".join(frames) + b"no frame")
    assert read(path)[1] == ["bad_compression"]
    path.write_bytes(b"no frame" + b"".join(frames))
    assert read(path) == ([], ["bad_compression"])


def warc(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    """One response record."""
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines)).encode() + b"\r\n"
    block = head + body
    return (
        b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.b/\r\nWARC-Date: 2020-01-01T00:00:00Z\r\n"
        b"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\nContent-Type: application/http; msgtype=response\r\n"
        b"Content-Length: " + str(len(block)).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"
    )


def arc(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    """The same page in an ARC file."""
    block = f"HTTP/1.1 {status}\r\n".encode() + "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body
    first = b"1 0 test\nURL IP-address Archive-date Content-type Archive-length\n"
    return (
        b"filedesc://a.arc 0.0.0.0 20200101000000 text/plain %d\n" % len(first)
        + first
        + b"\nhttp://a.b/ 1.2.3.4 20200101000000 text/html %d\n" % len(block)
        + block
        + b"\n"
    )


SENTENCE = "Straße und Fluß sind schöne alte Wörter, die jeder kennt."
PAGE = f"<html><head><title>t</title></head><body><p>{SENTENCE}</p></body></html>"
HTML = "Content-Type: text/html"
ZSTD = zstandard.compress(PAGE.encode())


@pytest.mark.parametrize("record", [warc, arc])
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (PAGE.encode(), [f"{HTML}; charset=utf-8"]),
        (PAGE.encode(), [f"{HTML}; charset=iso-8859-1"]),  # the server is wrong
        (PAGE.encode("latin-1"), [f"{HTML}; charset=ISO-8859-1"]),
        (PAGE.encode("latin-1"), [f"{HTML}; charset=nonsense"]),
        (PAGE.replace("<head>", "<head><meta charset='iso-8859-15'>").encode("iso-8859-15"), [HTML]),
        (PAGE.encode("utf-8-sig"), [f"{HTML}; charset=latin-1"]),
        (PAGE.encode("utf-16"), [HTML]),
        (PAGE.encode("utf-16-le"), [f"{HTML}; charset=utf-16le"]),
        (gzip.compress(PAGE.encode(), mtime=0), [HTML, "Content-Encoding: gzip"]),
        (PAGE.encode(), [HTML, "Content-Encoding: gzip"]),  # it is not
        (ZSTD, [HTML, "Content-Encoding: zstd"]),
        (zlib.compress(PAGE.encode()), [HTML, "Content-Encoding: deflate"]),
        (zlib.compress(PAGE.encode())[2:-4], [HTML, "Content-Encoding: deflate"]),
        (b"%x\r\n" % len(PAGE.encode()) + PAGE.encode() + b"\r\n0\r\n\r\n", [HTML, "Transfer-Encoding: chunked"]),
        (PAGE.encode(), [HTML, "Transfer-Encoding: chunked"]),  # it is not
        (SENTENCE.encode(), ["Content-Type: text/plain"]),
        (SENTENCE.encode("latin-1"), ["Content-Type: text/plain; charset=latin-1"]),
        (SENTENCE.encode("latin-1"), ["Content-Type: text/plain"]),
        (SENTENCE.encode("latin-1"), ["Content-Type: text/plain; charset=utf-8"]),  # it is not
        (SENTENCE.encode("latin-1"), ["Content-Type: text/plain; charset=nonsense"]),
        (SENTENCE.encode(), ["Content-Type: text/plain; charset=latin-1"]),
        (SENTENCE.encode("utf-16"), ["Content-Type: text/plain"]),
        (SENTENCE.encode("utf-16-le"), ["Content-Type: text/plain; charset=utf-16le"]),
        (PAGE.encode().decode("latin-1").encode(), [HTML]),  # encoded twice
    ],
)
def test_pages_are_read_in_every_encoding(tmp_path, record, body, lines):
    path = tmp_path / "a.warc"
    path.write_bytes(record(body, *lines))
    assert read(path) == ([SENTENCE], [])


@pytest.mark.parametrize("record", [warc, arc])
@pytest.mark.parametrize(
    ("body", "lines", "reason"),
    [
        (f"{SENTENCE} 語".encode() + b"\xff", ["Content-Type: text/plain"], "wrong_encoding"),
        (b"\xfa\xce\x0c\x1b" * 50, [HTML, "Content-Encoding: br"], "bad_record"),
        (ZSTD[:9] + b"\xff" * 9 + ZSTD[18:], [HTML, "Content-Encoding: zstd"], "bad_record"),
        (gzip.compress(PAGE.encode(), mtime=0)[:-30], [HTML, "Content-Encoding: gzip"], None),
        (
            gzip.compress(b"0" * (MAX_RECORD_BYTES + 99), mtime=0),
            [HTML, "Content-Encoding: gzip"],
            "record_too_large",
        ),  # a bomb
        (PAGE.replace("Fluß", "Flu\0\0\0ß").encode(), ["Content-Type: text/plain"], "binary"),
        (PAGE.replace("alte", "fellépÅ‘k különbözÅ‘ véletlenszerűen " * 9).encode(), [HTML], "mojibake"),
        (b"", [HTML], "empty"),
        (b"<div>" * 100_000 + b"text", [HTML], "nested_too_deeply"),
    ],
    ids=["encoding", "compression", "damage", "cut", "bomb", "binary", "mojibake", "empty", "deep"],
)
def test_pages_that_are_none(tmp_path, record, body, lines, reason):
    path = tmp_path / "a.warc"
    path.write_bytes(record(body, *lines) + (record(PAGE.encode(), HTML) if record is warc else b""))
    texts, reasons = read(path)
    assert SENTENCE in texts or record is arc
    assert reasons == ([reason] if reason else [])


@pytest.mark.parametrize("record", [warc, arc])
def test_answers_that_are_no_pages_are_passed_over(tmp_path, record):
    path = tmp_path / "a.warc"
    for lines, status, what in (
        ([HTML], "404 Not Found", "HTTP 404"),
        (["Content-Type: image/png"], "200 OK", "image/png"),
        ([], "200 OK", "unknown content type"),
    ):
        path.write_bytes(record(PAGE.encode(), *lines, status=status))
        assert read(path) == ([], []) and set(noted(path)) <= {what, "HTTP without a status"} and noted(path)


def test_records_that_are_no_pages_are_counted_as_what_they_are(shared_data, tmp_path):
    assert noted(shared_data / "web" / "IAH-urls-wget.warc.gz", ".gz") == {
        "WARC warcinfo": 1, "WARC request": 16, "HTTP 302": 7, "HTTP 301": 2, "image/jpeg": 1, "image/gif": 1, "image/png": 1, "text/xml": 1,
        "metadata: record": 3,
    }  # fmt: skip
    assert noted(shared_data / "web" / "whirlwind.warc.wat.gz", ".gz") == {"WARC warcinfo": 1, "WARC metadata": 1}
    path = tmp_path / "a.arc"
    path.write_bytes(
        b"filedesc:x 0.0.0.0 20200101000000 text/plain 4\n1 0\n\ndns:example.org 127.0.0.1 20200101000000 text/dns 4\nname\n"
    )
    assert noted(path) == {"dns: record": 1} and read(path) == ([], [])


def test_broken_arc_files(tmp_path):
    path = tmp_path / "a.arc"
    good = arc(PAGE.encode(), HTML)
    path.write_bytes(good[:-20])
    assert read(path) == ([], ["truncated"])
    path.write_bytes(good + b"no header here\n")
    assert read(path) == ([SENTENCE], ["bad_archive"])
    path.write_bytes(good.replace(b"HTTP/1.1 200", b"GOPHER 1 200"))
    assert read(path) == ([], ["bad_record"])
