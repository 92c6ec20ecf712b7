"""Semantic deduplication against a walk over all pairs, with vectors from a column and from a model; and its mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data.stage import Data
from hone.text.dedup.kmeans import assign, centroids_of, prune
from tests.data.stories import story

QUIET = Run(quiet=True)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def planted(seed: int, count: int = 300, copies: int = 60, width: int = 16) -> np.ndarray:
    """Random directions and noisy copies of some, cosine about .99."""
    draw = np.random.default_rng(seed)
    base = unit(draw.normal(size=(count, width)))
    return np.concatenate(
        [base, unit(base[draw.integers(0, count, copies)] + draw.normal(size=(copies, width)) * 0.03)]
    )


def by_the_paper(vectors, cluster, rank, least) -> set[int]:
    """The indices that stay: in each cluster, in order, those that no earlier one is near (Abbas et al., algorithm A.1)."""
    stay = set()
    for number in set(cluster.tolist()):
        members = sorted(np.flatnonzero(cluster == number).tolist(), key=lambda index: (rank[index], index))
        for place, index in enumerate(members):
            if all(float(vectors[index] @ vectors[other]) <= least for other in members[:place]):
                stay.add(index)
    return stay


@pytest.mark.parametrize("count", [1, 5, 40])
def test_what_stays_is_what_a_walk_over_all_pairs_keeps(count):
    vectors = planted(count)
    nearest, similarity = assign(vectors, centroids_of(vectors, count, 20, 1))
    stands = prune(vectors, nearest, similarity, 0.95)
    stays = set(np.flatnonzero(stands == np.arange(len(stands))).tolist())
    assert stays == by_the_paper(vectors, nearest, similarity, 0.95) and len(stays) < len(vectors)
    assert (stands[stands] == stands).all() and (nearest[stands] == nearest).all()
    for index in set(range(len(vectors))) - stays:
        assert similarity[stands[index]] <= similarity[index]  # farthest from the centroid first


def test_clusters_lose_few_duplicates():
    vectors = planted(7, count=2000, copies=400)
    one = prune(vectors, np.zeros(len(vectors), np.int64), np.zeros(len(vectors)), 0.95)
    nearest, similarity = assign(vectors, centroids_of(vectors, 20, 20, 1))
    many = prune(vectors, nearest, similarity, 0.95)
    all_gone, gone = ((found != np.arange(len(vectors))).sum() for found in (one, many))
    assert all_gone >= 380 and gone >= 0.85 * all_gone


def test_kmeans_finds_separate_groups_and_fills_empty_clusters():
    draw = np.random.default_rng(0)
    middle = np.eye(4, dtype=np.float32)
    vectors = unit(np.repeat(middle, 25, 0) + draw.normal(size=(100, 4)) * 0.05)
    for seed in range(5):
        nearest, similarity = assign(vectors, centroids_of(vectors, 4, 50, seed))
        assert len(set(nearest.tolist())) == 4
        assert (
            np.linalg.norm(centroids_of(vectors, 4, 50, seed), axis=1) == pytest.approx(1, abs=1e-5)
        ) and similarity.max() <= 1.0001
    same = np.repeat(unit(np.ones((1, 3))), 6, 0)
    assert np.isfinite(centroids_of(same, 3, 5, 0)).all()


def make(folder: Path, out: str, technique: dict, **changes):
    given = {"source": str(folder / "in"), "tokenizer": {"vocab_size": 300}, "filters": ["length"], **changes}
    return Data.read({**given, "dedups": [{"kind": "semantic", **technique}]}).make(folder / out, run=QUIET)


def write(folder: Path, rows: list[dict]) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_vectors_of_a_column_decide(tmp_path):
    vectors = [[1, 0, 0], [0.99, 0.05, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1], None]
    write(tmp_path, [{"text": story(n), **({"vec": one} if one else {})} for n, one in enumerate(vectors)])
    made = make(tmp_path, "out", {"column": "vec", "clusters": 1}, metadata_fields=["vec"])
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    kept = {row["text"] for row in rows}
    assert len(kept) == 5 and {story(n) for n in range(2, 6)} < kept
    step = json.loads((made.folder / "stats.json").read_text())["steps"][-1]
    assert step["reasons"]["semantic_duplicate"]["documents"] == 1
    assert step["figures"]["clusters"] == 1 and step["figures"]["documents_without_vector"] == 1
    assert sorted(row["cluster_size"] for row in rows) == [1, 1, 1, 1, 2]
    other = make(tmp_path, "near", {"column": "vec", "clusters": 1, "keep": "nearest"}, metadata_fields=["vec"])
    assert {row["text"] for row in parquet.read_table(other.folder / "documents").to_pylist()} ^ kept == {
        story(0),
        story(1),
    }


@pytest.mark.slow
def test_a_model_embeds_and_equal_texts_are_duplicates(tmp_path, tiny_llama):
    pairs = [story(n, 40) for n in range(6)]
    write(tmp_path, [{"text": text} for text in [*pairs, pairs[0], pairs[1]]])
    made = make(tmp_path, "out", {"model": str(tiny_llama), "clusters": 1, "epsilon": 1e-4, "max_tokens": 100})
    texts = [row["text"] for row in parquet.read_table(made.folder / "documents").to_pylist()]
    assert sorted(texts) == sorted(pairs)
    run = Run(quiet=True, executor={"kind": "processes", "workers": 1})
    given = {"source": str(tmp_path / "in"), "tokenizer": {"vocab_size": 300}, "filters": ["length"]}
    technique = {"kind": "semantic", "model": str(tiny_llama), "clusters": 1, "epsilon": 1e-4, "max_tokens": 100}
    assert Data.read({**given, "dedups": [technique]}).make(tmp_path / "two", run=run).content == made.content


@pytest.mark.slow
def test_the_vector_is_the_pooled_final_state(tiny_llama):
    import torch
    import transformers

    from hone.data.dedup.embedding import opened
    from hone.model.tokenizer import load_tokenizer

    ids = load_tokenizer(tiny_llama).encode("once upon a time")
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(tiny_llama)(torch.tensor([ids])).last_hidden_state[0]
    embed = opened(str(tiny_llama), "cpu")
    np.testing.assert_allclose(embed("once upon a time", "mean", 512), states.mean(0).numpy(), atol=1e-4)
    np.testing.assert_allclose(embed("once upon a time", "last", 512), states[-1].numpy(), atol=1e-4)


def test_mistakes_are_said(tmp_path):
    for technique in ({}, {"model": "x", "column": "words"}):
        with pytest.raises(SpecError, match="give either model, a folder, or column"):
            make(tmp_path, "out", technique)
    write(tmp_path, [{"text": story(0), "vec": [1, 2]}, {"text": story(1), "vec": [1, 2, 3]}])
    with pytest.raises(SpecError, match="'none' is no column"):
        make(tmp_path, "out", {"column": "none"})
    with pytest.raises(SpecError, match=r"vectors of lengths \[2, 3\]"):
        make(tmp_path, "out", {"column": "vec"}, metadata_fields=["vec"])
    with pytest.raises(SpecError, match="is not a model folder"):
        make(tmp_path, "out", {"model": str(tmp_path)})


def test_a_model_without_torch_is_said(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hone.data import DEDUPS\nfrom hone.base.errors import MissingExtra\n"
        "try: DEDUPS.read({'kind': 'semantic', 'model': 'x'}).need_vectors()\n"
        "except MissingExtra as error: assert 'hone-llm[models]' in str(error)\nelse: raise SystemExit(3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
