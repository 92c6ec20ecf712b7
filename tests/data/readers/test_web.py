"""WARC and WET records and HTML extraction against public archives and 181 pages with gold article text."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from hone.data.readers.listing import File
from hone.data.readers.read import Broken, Document, Options, read_file
from hone.data.readers.web import html_to_text


def read(path: Path) -> tuple[list[str], list[str]]:
    """(texts, reasons of what is broken) of one archive."""
    file = File(path, path.name, path.stat().st_size, "warc", ".gz" if ".gz" in path.name else "")
    items = list(read_file(file, Options()))
    return (
        [item.text for item in items if isinstance(item, Document)],
        [item.reason for item in items if isinstance(item, Broken)],
    )


@pytest.mark.parametrize(
    ("name", "num_texts", "broken"),
    [
        ("warcio/example.warc.gz", 1, []),
        ("warcio/example-iana.org-chunked.warc", 1, []),
        ("warcio/example-bad-non-chunked.warc.gz", 1, []),
        ("warcio/example-bad.warc.gz.bad", 1, []),
        ("warcio/example-wrong-chunks.warc.gz", 1, []),
        ("warcio/example-trunc.warc", 1, ["truncated"]),
        ("warcio/example.arc.gz", 0, ["bad_archive"]),
        ("IAH-urls-wget.warc.gz", 6, []),
        ("resiliparse-warcfile.warc.gz", 16, []),
        ("whirlwind.warc.wat.gz", 0, ["empty"]),
    ],
)
def test_archives_good_and_broken(shared_data, name, num_texts, broken):
    texts, reasons = read(shared_data / "web" / name)
    assert (len(texts), reasons) == (num_texts, broken)


def test_warc_and_wet_of_one_page_agree(shared_data):
    (page,), _ = read(shared_data / "web" / "whirlwind.warc.gz")
    (everything,), _ = read(shared_data / "web" / "whirlwind.warc.wet.gz")
    words = set(re.findall(r"\w+", page))
    assert (
        len(words & set(re.findall(r"\w+", everything))) / len(words) > 0.9
    )  # main text is part of all text; the extractor runs "1979–1983" together


def test_an_archive_cut_anywhere_loses_only_its_end(shared_data, tmp_path):
    whole = (shared_data / "web" / "resiliparse-warcfile.warc.gz").read_bytes()
    complete, _ = read(shared_data / "web" / "resiliparse-warcfile.warc.gz")
    for part in range(1, 12):
        path = tmp_path / "cut.warc.gz"
        path.write_bytes(whole[: len(whole) * part // 12])
        texts, _ = read(path)
        assert texts[:-1] == complete[: max(len(texts) - 1, 0)] and len(texts) <= len(complete)


def test_a_warc_inside_zstd_and_plain(shared_data, tmp_path):
    import zstandard

    raw = gzip.decompress((shared_data / "web" / "warcio" / "example.warc.gz").read_bytes())
    expected = read(shared_data / "web" / "warcio" / "example.warc.gz")
    (tmp_path / "a.warc").write_bytes(raw)
    assert read(tmp_path / "a.warc") == expected
    path = tmp_path / "a.warc.zst"
    path.write_bytes(zstandard.compress(raw))
    items = read_file(File(path, path.name, 1, "warc", ".zst"), Options())
    assert [item.text for item in items] == expected[0]


def shingles(text: str) -> Counter:
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[i : i + 4]) for i in range(max(len(words) - 3, 1)))


def test_main_text_of_gold_pages(shared_data):
    with tarfile.open(shared_data / "web" / "article-extraction-benchmark.tar") as archive:
        gold = json.load(archive.extractfile("ground-truth.json"))
        names = sorted(name for name in archive.getnames() if name.endswith(".html.gz"))[::3]
        pages = {
            Path(name).name[: -len(".html.gz")]: gzip.decompress(archive.extractfile(name).read()) for name in names
        }
    precision = recall = 0.0
    for name, raw in pages.items():
        found, wanted = shingles(html_to_text(raw)), shingles(gold[name]["articleBody"])
        common = sum((found & wanted).values())
        precision += common / sum(found.values()) / len(pages)
        recall += common / sum(wanted.values()) / len(pages)
    assert 2 * precision * recall / (precision + recall) > 0.90
