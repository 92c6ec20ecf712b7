"""The trained tokenizer round-trips any text, equals transformers' reading of it, and trains the same twice."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import ArtifactError, SpecError
from hone.data.tokens.spec import Tokenizer
from hone.data.tokens.tokenizer import load, take, train

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # the sum of x and {i}, naïve\n" * 3 for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train(Tokenizer(vocab_size=400), TEXTS, folder)
    return folder


@settings(max_examples=200)
@given(st.text(max_size=80) | st.sampled_from(["<|endoftext|>", "a<|endoftext|>b", "\n\n\n", "日本語🙂"]))
def test_round_trip(folder, text):
    encoder = load(folder)
    (ids,) = encoder.encode([text])
    assert ids[-1] == encoder.eos_token_id and encoder.eos_token_id not in ids[:-1]
    assert encoder.core.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_transformers_reads_it_the_same(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    encoder = load(folder)
    assert theirs.eos_token == "<|endoftext|>" and theirs.bos_token is None and len(theirs) == encoder.vocab_size == 400
    for text in [*TEXTS[:5], "héllo\n\n  wörld"]:
        ids = encoder.encode([text])[0][:-1].tolist()
        assert theirs(text).input_ids == ids and theirs.decode(ids) == text


def test_training_twice_gives_the_same_bytes(folder, tmp_path):
    train(Tokenizer(vocab_size=400), TEXTS, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_long_texts_are_encoded_in_pieces(folder, monkeypatch):
    encoder = load(folder)
    text = "".join(TEXTS)
    monkeypatch.setattr("hone.data.tokens.tokenizer._PIECE_CHARS", 700)
    (ids,) = encoder.encode([text])
    assert encoder.core.decode(ids[:-1].tolist()) == text


def test_taking_a_real_tokenizer(shared_data, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    raw = gzip.decompress((shared_data / "tokenizers" / "pythia-neox" / "tokenizer.json.gz").read_bytes())
    (source / "tokenizer.json").write_bytes(raw)
    (tmp_path / "out").mkdir()
    take(str(source), tmp_path / "out")
    encoder = load(tmp_path / "out")
    assert encoder.eos_token_id == 0 and encoder.dtype == np.dtype("<u2")
    assert encoder.encode(["Hello world"])[0].tolist() == [12092, 1533, 0]
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<none>"}}))
    with pytest.raises(SpecError, match="no end-of-text"):
        load(source)


def test_missing_and_corrupt(tmp_path):
    with pytest.raises(ArtifactError, match="has no tokenizer"):
        take(str(tmp_path), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a tokenizer"):
        load(tmp_path)
