"""Masks: what is personal is replaced, what only looks like it stays, and no sample shows what was masked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pyarrow import parquet

from benchmarks.data.personal import PLAIN, generated, luhn
from hone.base.errors import SpecError
from hone.data import EDITS
from hone.data.edits.mask import Placeholders
from hone.data.stage import Data
from hone.text.batch import Texts
from hone.text.personal import checks, secrets
from hone.text.personal.find import find
from tests.data.edits.memory import Memory

PLACEHOLDERS = Placeholders().model_dump()


def masked(texts: list[str], folder, **options) -> tuple[list[str], dict]:
    corpus = Memory(texts, borders=(len(texts),))
    spec = EDITS.read({"kind": "mask", **options})
    cuts = spec.cuts(corpus, np.ones(len(texts), bool), folder)
    return corpus.after(cuts), spec.figures(corpus, cuts, folder)


def test_plain_text_stays(tmp_path):
    left, figures = masked(list(PLAIN), tmp_path)
    assert left == list(PLAIN)
    assert all(row["spans"] == 0 for row in figures["rules"].values())


def test_generated_values_are_replaced_and_counted(tmp_path):
    rows = [row for row in generated(7, 40) if row.kind]
    left, figures = masked([row.text for row in rows], tmp_path)
    missed = [row for row, text in zip(rows, left) if row.value in text]
    assert len(missed) <= len(rows) // 50
    whole = sum(text == row.text.replace(row.value, PLACEHOLDERS[row.kind]) for row, text in zip(rows, left))
    assert whole >= 0.95 * len(rows)
    assert all(figures["rules"][kind]["documents"] >= 38 for kind in PLACEHOLDERS)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Call 212-555-0123x52003 now.", "Call <PHONE_NUMBER> now."),
        ("Call (212) 555-0123 ext. 12, please.", "Call <PHONE_NUMBER>, please."),
        ("Phone: +49 30 901820 x7.", "Phone: <PHONE_NUMBER>."),
        ("Tel 030 901820 Ext 45 is open.", "Tel <PHONE_NUMBER> is open."),
        ("A grid of 212-555-0123x52003y stays.", "A grid of 212-555-0123x52003y stays."),
        ("Card 676770830490? No: 675911122233 is not one.", "Card 676770830490? No: 675911122233 is not one."),
        (f"Card {luhn('50180000123')} ends.", "Card <CREDIT_CARD> ends."),
        (f"Part {luhn('10180000123')} ends.", f"Part {luhn('10180000123')} ends."),
    ],
)
def test_extensions_and_short_cards(text, left, tmp_path):
    assert masked([text], tmp_path)[0] == [left]


def test_the_stage_writes_placeholders_and_shows_nothing_else(tmp_path):
    prose = (
        "The garden behind the house, number {n}, had been left to itself for many years, and nobody could say why. "
        * 3
    )
    rows = [
        {"text": f"{prose.format(n=n)}\nWrite to gardener{n}@example.org or to 52.18.33.{n + 1}."} for n in range(20)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Data(
        source=str(tmp_path / "in.jsonl"),
        filters=[],
        dedups=[],
        edits=["mask", "c4_lines"],
        tokenizer={"vocab_size": 300},
    )
    made = spec.make(tmp_path / "out")
    for path in made.folder.rglob("*.json*"):
        assert "gardener1" not in path.read_text(encoding="utf8"), path
    texts = [
        text
        for path in (made.folder / "documents").glob("*.parquet")
        for text in parquet.read_table(path)["text"].to_pylist()
    ]
    assert len(texts) == 20
    assert all(text.endswith("Write to <EMAIL_ADDRESS> or to <IP_ADDRESS>.") for text in texts)
    mask = next(
        step for step in json.loads((made.folder / "stats.json").read_text())["steps"] if step["name"] == "mask"
    )
    assert {name: row["spans"] for name, row in mask["figures"]["rules"].items() if row["spans"]} == {
        "email": 20,
        "ip": 20,
    }
    samples = [json.loads(line) for line in (made.folder / "dropped.jsonl").read_text().splitlines()]
    assert {row["text"] for row in samples if row["reason"] == "cut_out" and row["step"] == "mask"} == {
        "<EMAIL_ADDRESS>"
    }


def test_placeholders_and_kinds_are_chosen(tmp_path):
    texts = ["Write to ann@example.org or call +44 20 7946 0958."]
    left, _ = masked(texts, tmp_path, kinds=["email"], placeholders={"email": "[adresse]"})
    assert left == ["Write to [adresse] or call +44 20 7946 0958."]
    with pytest.raises(SpecError, match="placeholder"):
        EDITS.read({"kind": "mask", "placeholders": {"email": "x" * 65}})
    with pytest.raises(SpecError, match="kinds"):
        EDITS.read({"kind": "mask", "kinds": ["face"]})


def test_texts_do_not_see_their_neighbours(tmp_path):
    left, _ = masked(["ends in x", "8.8.4.4", "1", "52.18.33.7", "ann", "@example.org", "-", "536-90-4399"], tmp_path)
    assert left == ["ends in x", "<IP_ADDRESS>", "1", "<IP_ADDRESS>", "ann", "@example.org", "-", "<US_SSN>"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("GB82 WEST 1234 5698 7654 32", False),
        ("GB82 WEST 1234 5698 7654 33", True),
        (f"card {luhn('411111111111111')}", False),
        ("card 4111111111111112", True),
        ("2001:4860:4860::8888", False),
        ("2001:db8::8888 fe80::1 12:34:56", True),
        ("version 8.8.4.4", True),
        ("0049 30 123456 and so on", False),
        ("Tel.: 030/1234567", False),
        ("Seite 030/1234567", True),
        ("git@github.com:a/b.git and A@B.mean()", True),
        ("icon@2x.png", True),
        ("password = 'hunter2hunter2hunter2'", True),
        ("api_key = 'q8Zr7TnV2xKp4WdLs0Bf'", False),
    ],
)
def test_checks(text, kept, tmp_path):
    left, _ = masked([text], tmp_path)
    assert (left[0] == text) is kept


def test_a_key_without_an_end_does_not_take_the_rest(tmp_path):
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "Ab1+" * 16 + "\n" + "Cd2/" * 16 + "\n"
    left, _ = masked([key + "And the story goes on for a while. " * 9], tmp_path)
    assert left[0].startswith("<SECRET>\nAnd the story goes on")


def test_long_runs_take_linear_time():
    texts = ["a" * 300_000, "1" * 300_000, "1 " * 150_000, "key=" + "aB" * 150_000 + "1", "@" * 300_000, "a:b:" * 75_000,
             "a." * 150_000 + "@b", "-----BEGIN PRIVATE KEY-----" * 2000, "password=" + "abc" * 60 + "1!"]  # fmt: skip
    order = tuple(PLACEHOLDERS)
    found = find(Texts.of(texts), order, order)
    assert (found[2] > found[1]).all()


def test_entropy_is_in_bits():
    assert secrets.entropy(b"abcd") == 2.0
    assert secrets.entropy(b"aaaa") == 0.0


def test_the_example_numbers_of_all_regions_are_found():
    numbers = pytest.importorskip("phonenumbers")
    found = total = 0
    for region in numbers.SUPPORTED_REGIONS:
        number = numbers.example_number(region)
        text = numbers.format_number(number, numbers.PhoneNumberFormat.INTERNATIONAL).encode()
        total += 1
        found += checks.phone(text, 0, len(text), b"") is not None
    assert found >= 0.95 * total
