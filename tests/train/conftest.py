"""A small data artifact written by hand, and small models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hone.model.families import Shape
from tests.conftest import byte_tokenizer

SHAPE = Shape(
    hidden_size=48, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=96, max_seq_len=128, norm_eps=1e-5
)
"""Small enough that a training step takes milliseconds."""


def write_data(folder: Path, num_documents: int = 120, seed: int = 0) -> Path:
    """A data artifact (contents only) of sentences over a few words, in which the next word can be guessed."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "tokens").mkdir(parents=True)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "and",
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
    ]
    draw = np.random.default_rng(seed)
    splits = {}
    for split, count in (("train", num_documents), ("val", 20)):
        texts = []
        for _ in range(count):
            at = int(draw.integers(len(words)))
            texts.append(" ".join(words[(at + step) % len(words)] for step in range(int(draw.integers(5, 60)))))
        documents = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
        tokens = np.concatenate([np.asarray(document, "<u2") for document in documents])
        tokens.tofile(folder / "tokens" / f"{split}.bin")
        starts = np.cumsum([0, *map(len, documents)])
        np.save(folder / "tokens" / f"{split}.starts.npy", starts.astype(np.int64))
        splits[split] = {"tokens": len(tokens), "documents": count, "bytes": sum(len(text) for text in texts)}
    meta = {
        "dtype": "uint16",
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": splits,
    }
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("made") / "data-small")
