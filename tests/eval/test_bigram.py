"""The bigram model against its formula written out over dictionaries, and on a data artifact."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hone.eval.bigram import DISCOUNT, Bigram, bigram_perplexity


def by_hand(tokens: list[int], vocab_size: int, before: int, after: int) -> float:
    """P(after | before) of interpolated Kneser-Ney."""
    pairs, of = Counter(itertools.pairwise(tokens)), Counter(tokens[:-1])
    ends = Counter(b for _, b in pairs)
    alone = (max(ends[after] - DISCOUNT, 0) + DISCOUNT * len(ends) / vocab_size) / len(pairs)
    if not of[before]:
        return alone
    distinct = sum(a == before for a, _ in pairs)
    return (max(pairs[before, after] - DISCOUNT, 0) + DISCOUNT * distinct * alone) / of[before]


def test_it_is_kneser_ney_and_a_distribution():
    tokens = np.random.default_rng(0).integers(0, 5, 60) ** 2 % 11  # some of 12 tokens are never seen
    model = Bigram(tokens.astype(np.uint16), 12)
    for before in range(12):
        losses = model.loss(np.full(12, before), np.arange(12))
        assert np.exp(-losses).sum() == pytest.approx(1)
        wanted = [-math.log(by_hand(tokens.tolist(), 12, before, after)) for after in range(12)]
        assert losses == pytest.approx(wanted)


def write(folder: Path, **splits: list[int]) -> Path:
    import json

    (folder / "tokens").mkdir(parents=True)
    rows = {}
    for name, tokens in splits.items():
        np.array(tokens, "<u2").tofile(folder / "tokens" / f"{name}.bin")
        np.save(folder / "tokens" / f"{name}.starts.npy", np.array([0, len(tokens)]))
        rows[name] = {"tokens": len(tokens), "documents": 1, "bytes": len(tokens)}
    meta = {"dtype": "uint16", "vocab_size": 8, "eos_token_id": 0, "splits": rows}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


def test_only_the_scored_tokens_count(tmp_path):
    train, val = [1, 2, 3, 1, 2, 4, 0] * 9, np.array([1, 2, 7, 7, 3])
    data = write(tmp_path / "data", train=train, val=val.tolist())
    found, note = bigram_perplexity(data, "val", val, np.array([False, True, False, False, True]))
    wanted = [by_hand(train, 8, 1, 2), by_hand(train, 8, 7, 3)]
    assert found == pytest.approx(math.exp(-sum(map(math.log, wanted)) / 2))
    assert "63 tokens of train" in note
    scored = np.array([False, True, True, True, True])
    assert bigram_perplexity(data, "train", val, scored) == (None, "the text is the train split itself")
    alone = write(tmp_path / "alone", val=val.tolist())
    assert bigram_perplexity(alone, "val", val, scored) == (None, "the data has no train split")
