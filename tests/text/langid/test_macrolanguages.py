"""Macrolanguages: confusable languages answer with one code, whose probability is the sum of theirs; filters and limits know it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import SpecError
from hone.data import IDENTIFIERS
from hone.data.stage import Data
from hone.text.batch import Texts
from hone.text.langid.identify import Identifier
from hone.text.langid.shipped import MACROLANGUAGES
from hone.text.signals.languages import languages

SAMPLE = Path(__file__).with_name("udhr.jsonl.xz")


def pieces() -> tuple[list[str], np.ndarray]:
    with lzma.open(SAMPLE, "rt", encoding="utf8") as file:
        rows = [json.loads(line) for line in file]
    return [row["text"] for row in rows], np.array([row["lang"] for row in rows], object)


def test_members_answer_as_one_and_others_as_before():
    texts, truth = pieces()
    batch = Texts.of(texts)
    split, split_scores = Identifier().identify_all(batch)
    joined, scores = Identifier(macrolanguages=True).identify_all(batch)
    assert not set(joined) & set(MACROLANGUAGES)
    expected = np.array([MACROLANGUAGES.get(code, code) for code in split], object)
    named = split != "unknown"
    assert (joined[named] == expected[named]).all() and (scores[named] >= split_scores[named] - 1e-12).all()
    others = ~np.isin(expected, list(MACROLANGUAGES.values())) & named
    assert (scores[others] == split_scores[others]).all()
    for code in ("msa", "hbs", "nor"):
        own = np.array([MACROLANGUAGES.get(one) == code for one in truth])
        assert np.mean((joined[own] == code) & (scores[own] >= 0.65)) >= 0.95, code
    wrong = np.isin(joined, ["msa", "hbs", "nor"]) & np.isin(truth, ["da", "sv", "sl", "tl"])
    assert wrong.mean() < 0.002


def test_a_subset_lets_no_neighbour_through():
    texts, truth = pieces()
    batch = Texts.of(texts)
    codes, _ = Identifier(("nor",), macrolanguages=True).identify_all(batch)
    assert set(codes) == {"nor", "unknown"}
    assert np.mean(codes[truth == "da"] == "nor") < 0.05 and np.mean(codes[truth == "sv"] == "nor") == 0


def test_names_that_the_identifier_cannot_give_are_errors_with_the_way_out():
    joined = {"kind": "hone", "macrolanguages": True}
    with pytest.raises(SpecError, match=r"identifier\.macrolanguages: true"):
        Data(filters=[{"kind": "language", "languages": ["msa"]}])
    with pytest.raises(SpecError, match="did you mean 'nor' for 'nb'"):
        Data(identifier=joined, filters=[{"kind": "language", "languages": ["nb"]}])
    Data(identifier=joined, filters=[{"kind": "language", "languages": ["msa", "en"]}])
    opened = IDENTIFIERS.read(joined).open(("hbs",))
    assert opened.languages == ("hbs",)


def test_limits_of_a_macrolanguage_hold_for_all_members():
    for code, members in (("msa", ("id", "ms")), ("hbs", ("bs", "hr", "sr")), ("nor", ("nb", "nn"))):
        joined = languages()[code]
        for member in members:
            own = languages()[member]
            assert set(own.stop_words) <= set(joined.stop_words)
            assert all(one >= other for one, other in zip(joined.grams, own.grams))
