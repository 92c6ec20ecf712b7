"""The documents table of a real data stage lies beside its packed tokens, document by document."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tokenizers

from hone.base.run import Run
from hone.data.stage import Data
from hone.feed import CURRICULA
from hone.feed.load import PackedTokens
from hone.feed.mix.sources import Sources, by_column
from hone.feed.order.documents import texts_of


@pytest.fixture(scope="module")
def made(mini_source, tmp_path_factory):
    source = shutil.copytree(mini_source, tmp_path_factory.mktemp("copied") / "source")
    for name, text in (("stories", "once upon a time there was a fox. "), ("notes", "buy milk and bread, then rest. ")):
        (source / name).mkdir()
        for number in range(12):
            (source / name / f"{number}.txt").write_text("".join(f"{number} {n} {text}" for n in range(3 + number)))
    spec = {"source": str(source), "tokenizer": {"vocab_size": 400}, "filters": ["length"], "dedups": ["exact"]}
    return Data.read({**spec, "validation_fraction": 0.2}).make(
        tmp_path_factory.mktemp("line") / "data-real", {}, Run(quiet=True)
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_and_texts_are_the_same_documents(made, split):
    data = PackedTokens(made.folder, split)
    tokenizer = tokenizers.Tokenizer.from_file(str(made.folder / "tokenizer.json"))
    texts = texts_of(made.folder, split, np.arange(data.num_documents))
    assert len(texts) == data.num_documents > 3
    for document, text in zip(data.documents(), texts):
        assert tokenizer.decode(document[:-1].tolist()) == text


def test_every_known_signal_is_a_column_of_the_stage(made):
    data = PackedTokens(made.folder)
    for signal in ("compression_ratio", "lexical_diversity", "flesch", "length"):
        hardness = CURRICULA.read({"kind": "staged", "signal": signal}).difficulty(data, 64)
        assert np.isfinite(hardness).all() and hardness.std() > 0
    assert CURRICULA.read("multi_task").sources(data, 64).max() >= 2


def test_top_folders_are_sources(made):
    parts = by_column(PackedTokens(made.folder), "group")
    assert {"stories/", "notes/"} <= set(parts)
    found = Sources({"only": made.folder}, "group")
    assert sum(part.num_bytes for part in found.parts.values()) <= found.train.num_bytes
