"""Training: the shipped file comes out again, and a model of four fifths of the sentences knows the fifth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hone.text.batch import Texts
from hone.text.langid import train
from hone.text.langid.identify import Identifier
from hone.text.langid.model import Model
from hone.text.langid.shipped import UNKNOWN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sentences(shared_data):
    return train.read(shared_data / "langid" / "lingua-sentences-75x1000.jsonl.gz")


def test_the_shipped_model_comes_out_again(shared_data, tmp_path, capsys):
    out = tmp_path / "languages.bin"
    train.main([str(shared_data / "langid" / "lingua-sentences-75x1000.jsonl.gz"), str(out)])
    assert "75 languages, 0 rejectors" in capsys.readouterr().out
    made, shipped = Model.load(out), Model.load()  # the text of the rejectors is not here
    assert (made.temperature, made.exponent) == (shipped.temperature, shipped.exponent)
    for one, other in zip(made.scripts, shipped.scripts, strict=True):
        assert one._replace(rows=(), rejectors=0) == other._replace(rows=(), rejectors=0)
        lanes = len(one.languages)
        assert np.array_equal(one.rows[:, :lanes], other.rows[:, :lanes])
        assert np.array_equal(one.rows[:, lanes], other.rows[:, other.lanes])  # the background
    assert {script.name for script in shipped.scripts if script.rejectors} >= {"latin", "cyrillic", "devanagari"}


def test_rejectors_take_texts_of_their_languages(tmp_path):
    rows = {"aa": [f"walking talking {word} singing" for word in ("the", "this", "that", "those") * 20]}
    others = {
        "bb": [f"laufen reden {word} sagen" for word in ("der", "dieser", "jener", "welcher") * 20],
        "cc": [f"parler marcher {word} dire" for word in ("le", "ce", "cette", "ceux") * 20],
    }
    plain, strict = Identifier.of(train.train(rows)), Identifier.of(train.train(rows, others))
    assert strict.languages == ("aa",) and train.train(rows, others).scripts[0].rejectors == 2
    texts = ["walking talking those singing", "laufen reden jener sagen", "parler marcher ceux dire"]
    assert [strict.identify(text)[0] for text in texts] == ["aa", UNKNOWN, UNKNOWN]
    assert plain.identify(texts[0])[0] == "aa"


def test_sentences_held_out_are_known(sentences):
    kept, held = train.split(sentences)
    identifier = Identifier.of(train.train(kept))
    whole = _accuracy(identifier, held)
    cut = _accuracy(identifier, {name: train.pieces(texts) for name, texts in held.items()})
    assert np.mean(list(whole.values())) >= 0.96
    assert np.mean(list(cut.values())) >= 0.97
    assert {name for name, share in cut.items() if share < 0.9} <= {"bs", "hr", "id", "ms"}


def _accuracy(identifier: Identifier, texts: dict[str, list[str]]) -> dict[str, float]:
    return {name: float(np.mean(identifier.identify_all(Texts.of(rows))[0] == name)) for name, rows in texts.items()}


def test_a_model_of_two_languages(tmp_path):
    rows = [("aa", f"walking talking {word} singing") for word in ("the", "this", "that", "those") * 20]
    rows += [("bb", f"laufen reden {word} sagen") for word in ("der", "dieser", "jener", "welcher") * 20]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"lang": lang, "text": text}) + "\n" for lang, text in rows))
    model = train.train(train.read(path))
    model.save(tmp_path / "model.bin")
    again = Model.load(tmp_path / "model.bin")
    assert again.languages == model.languages == ("aa", "bb") and again.scripts[0].name == "latin"
    assert np.array_equal(again.scripts[0].rows, model.scripts[0].rows)


def test_usage_is_told():
    with pytest.raises(SystemExit, match="SENTENCES OUT"):
        train.main(["only one"])


def test_unknown_is_no_language_of_the_model():
    assert UNKNOWN not in Model.load().languages
