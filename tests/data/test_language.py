"""Language identification on sentences of known language."""

from __future__ import annotations

import gzip
import json

import pytest

from hone.base.errors import SpecError
from hone.data.language import Identifier

BIG = ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru", "zh", "ja", "ko", "ar", "tr", "sv")


def sentences(shared_data, language: str, count: int) -> list[str]:
    found = []
    with gzip.open(shared_data / "langid" / "lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as file:
        for line in file:
            row = json.loads(line)
            if row["lang"] == language:
                found.append(row["text"])
                if len(found) == count:
                    break
    return found


@pytest.mark.parametrize(("candidates", "least"), [((), 0.85), (BIG, 0.97)])
def test_sentences_of_big_languages(shared_data, candidates, least):
    identifier = Identifier(candidates)
    hits = total = 0
    for language in BIG:
        for text in sentences(shared_data, language, 40):
            hits += identifier.identify(text)[0] == language
            total += 1
    assert total == 40 * len(BIG) and hits / total >= least


def test_unknown_languages_are_named():
    with pytest.raises(SpecError, match="unknown languages klingon"):
        Identifier(("en", "klingon"))


def test_any_text_gets_an_answer():
    code, score = Identifier().identify("1234 !!")
    assert isinstance(code, str) and 0 <= score <= 1
