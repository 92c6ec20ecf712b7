"""Batches are a pure function of the step, show every token once, and keep documents apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import ArtifactError, SpecError
from hone.feed.load import IGNORE, PackedTokens

EOS = 0


def write(folder: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    """A data folder by hand, each document closed by EOS."""
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    closed = [[*document, EOS] for document in documents]
    flat = np.array([token for document in closed for token in document], dtype)
    starts = np.cumsum([0, *map(len, closed)]).astype(np.int64)
    flat.tofile(folder / "tokens" / "train.bin")
    np.save(folder / "tokens" / "train.starts.npy", starts)
    row = {"tokens": len(flat), "documents": len(closed), "bytes": len(flat)}
    meta = {"dtype": dtype, "vocab_size": 1000, "eos_token_id": EOS, "splits": {"train": row}}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


# Distinct token ids in the whole corpus, so that a token names its place.
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def corpus(sizes: list[int]) -> list[list[int]]:
    numbers = iter(range(1, 1000))
    return [[next(numbers) for _ in range(size)] for size in sizes]


@settings(max_examples=150)
@given(lengths, st.integers(1, 17), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_shows_every_prediction_once(tmp_path_factory, sizes, seq_len, batch_size, seed):
    documents = corpus(sizes)
    data = PackedTokens(write(tmp_path_factory.mktemp("data"), documents))
    expected = sorted(pair for document in documents for pair in zip(document, [*document[1:], EOS]))
    num_rows = data.num_sequences(seq_len)
    steps = -(-num_rows // batch_size)
    batches = [data.batch(step, batch_size, seq_len, seed) for step in range(steps)]
    tokens, targets = (np.concatenate([batch[part] for batch in batches])[:num_rows] for part in (0, 1))
    seen = sorted((int(a), int(b)) for a, b in zip(tokens.ravel(), targets.ravel()) if b != IGNORE)
    assert seen == expected
    packing = data.packing(seq_len)
    assert (targets == IGNORE).sum() == packing.padding + packing.borders
    ids = np.concatenate([batch.document_ids for batch in batches])[:num_rows]
    assert (ids < 0).sum() == packing.padding and (ids >= 0).sum() == packing.tokens


@settings(max_examples=100)
@given(lengths, st.integers(1, 17), st.integers(0, 3))
def test_document_ids_part_documents(tmp_path_factory, sizes, seq_len, seed):
    documents = corpus(sizes)
    home = {token: number for number, document in enumerate(documents) for token in document}
    data = PackedTokens(write(tmp_path_factory.mktemp("data"), documents))
    for step in range(data.num_sequences(seq_len)):
        batch = data.batch(step, 1, seq_len, seed)
        real = [
            (home[token], ident)
            for token, ident in zip(batch.tokens[0].tolist(), batch.document_ids[0].tolist())
            if token
        ]
        assert len(set(real)) == len({a for a, _ in real}) == len({b for _, b in real})
        assert batch.document_ids[0, 0] == 0 and (np.diff(batch.document_ids[0][batch.document_ids[0] >= 0]) >= 0).all()


def test_batch_is_pure_and_epochs_differ(tmp_path):
    folder = write(tmp_path, corpus([9] * 30))
    data = PackedTokens(folder)
    far = data.batch(1000, 3, 8, seed=1)
    for step in (5, 999, 0):
        data.batch(step, 4, 8, seed=2)
    again, fresh = data.batch(1000, 3, 8, seed=1), PackedTokens(folder).batch(1000, 3, 8, seed=1)
    for one, other, third in zip(far, again, fresh):
        assert (one == other).all() and (one == third).all()
    rows = data.num_sequences(8)
    assert (data.batch(0, rows, 8, seed=1).tokens != data.batch(1, rows, 8, seed=1).tokens).any()
    assert (data.batch(0, rows, 8, seed=1).tokens != data.batch(0, rows, 8, seed=2).tokens).any()
    # Splitting a step over workers gives the same rows.
    halves = [data.sequences(np.arange(first, first + 2), 8, 1).tokens for first in (12, 14)]
    assert (np.concatenate(halves) == data.batch(3, 4, 8, seed=1).tokens).all()


def test_dtypes_documents_and_order(tmp_path):
    documents = corpus([3, 5])
    data = PackedTokens(write(tmp_path, documents, "uint32"))
    batch = data.batch(0, 2, 4, 0)
    assert batch.tokens.dtype == np.int64 and batch.targets.dtype == np.int64 and batch.document_ids.dtype == np.int32
    assert [document.tolist() for document in data.documents()] == [[*document, EOS] for document in documents]
    assert np.concatenate([part.tokens for part in data.in_order(2, 4)]).ravel()[:9].tolist() == [
        1,
        2,
        3,
        0,
        4,
        5,
        6,
        7,
        8,
    ]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ArtifactError, match="no packed tokens"):
        PackedTokens(tmp_path)
    write(tmp_path, corpus([3]))
    with pytest.raises(SpecError, match="no split 'test'"):
        PackedTokens(tmp_path, "test")
    path = tmp_path / "tokens" / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="lists 4 tokens"):
        PackedTokens(tmp_path)
    write(tmp_path, [])
    with pytest.raises(SpecError, match="too few"):
        PackedTokens(tmp_path).batch(0, 1, 4, 0)


def test_damaged_descriptions_are_a_users_mistake(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "train.bin").write_bytes(b"\1\0\2\0")
    row = {"tokens": 2, "documents": 1, "bytes": 2}
    meta = {"dtype": "uint16", "vocab_size": 9, "eos_token_id": 2, "splits": {"train": row}}
    (tokens / "meta.json").write_text(json.dumps(meta))
    np.save(tokens / "train.starts.npy", np.array([0, 2]))
    assert PackedTokens(tmp_path).num_tokens == 2
    np.save(tokens / "train.starts.npy", np.array([0, 1]))
    with pytest.raises(ArtifactError, match="corrupt"):
        PackedTokens(tmp_path)
    (tokens / "train.starts.npy").write_bytes(b"no array")
    with pytest.raises(ArtifactError, match="corrupt"):
        PackedTokens(tmp_path)
    for text in ("{}", "[]", "{", json.dumps(meta | {"dtype": "x"}), json.dumps(meta | {"splits": {"train": {}}})):
        (tokens / "meta.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"meta\.json is corrupt"):
            PackedTokens(tmp_path)
