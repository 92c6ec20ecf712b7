"""Vectors of documents, read from a column or made by a model, and the documents whose vectors are nearly parallel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.data.corpus import Corpus
from hone.data.dedup.groups import Found
from hone.text.dedup.kmeans import assign, centroids_of, prune

_PER_CLUSTER = 1000
"""Documents of a cluster when their number is not set: comparing costs so many products a document, assigning n / 1000."""


def write_vectors(spec: Any, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
    """Writes the unit vectors (float32 [k, D]) and the numbers (int64 [k]) of the chosen documents of every shard, where missing."""
    for number, shard, first, end in corpus.spans():
        path = state / f"vectors-{number:05d}.npz"
        if path.exists():
            continue
        here = np.flatnonzero(chosen[first:end])
        vectors = _read(spec, shard, here) if spec.column else _embed(spec, corpus, shard, first, chosen)
        found = np.isfinite(vectors).all(1) & (np.abs(vectors).sum(1) > 0) if len(vectors) else np.zeros(0, bool)
        vectors = vectors[found] / np.linalg.norm(vectors[found], axis=1, keepdims=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, vectors=vectors.astype(np.float32), numbers=here[found] + first)
        temporary.rename(path)


def compare(spec: Any, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
    """The groups of the documents where `kept` (bool [num_documents]), by the vectors in `state`."""
    parts = [np.load(state / f"vectors-{number:05d}.npz") for number, *_ in corpus.spans()]
    held = [(part["vectors"], part["numbers"]) for part in parts if len(part["numbers"])]
    stands = np.arange(len(corpus))
    if not held:
        raise SpecError(
            f"dedup 'semantic': no document has a vector{f' in {spec.column}' if spec.column else ''}",
            fix="copy the field with metadata_fields, as a list of numbers",
        )
    if len(widths := {vectors.shape[1] for vectors, _ in held}) > 1:
        raise SpecError(
            f"dedup.column = '{spec.column}' has vectors of lengths {sorted(widths)}",
            fix="give vectors of one length",
        )
    vectors, numbers = np.concatenate([one for one, _ in held]), np.concatenate([one for _, one in held])
    order = np.argsort(corpus.columns["id"][numbers], kind="stable")  # so that nothing depends on the order of reading
    vectors, numbers = vectors[order], numbers[order]
    count = spec.clusters or max(1, round(len(vectors) / _PER_CLUSTER))
    centroids = centroids_of(vectors, min(count, len(vectors)), spec.iterations, spec.seed)
    nearest, similarity = assign(vectors, centroids)
    found = prune(vectors, nearest, similarity if spec.keep == "farthest" else -similarity, 1 - spec.epsilon)
    stands[numbers] = numbers[found]
    sizes = np.bincount(nearest, minlength=len(centroids))
    figures = {
        "clusters": len(centroids),
        "largest_cluster": int(sizes.max()),
        "mean_cosine_to_centroid": round(float(similarity.mean()), 4),
        "documents_without_vector": int(kept.sum() - len(numbers)),
    }
    return Found(stands, {}, figures)


def _read(spec: Any, shard: Path, here: np.ndarray) -> np.ndarray:
    """The vectors (float64 [k, D]) in `column` of these documents of a shard; rows of NaN where there is none."""
    rows = parquet.read_table(shard, columns=["metadata"]).column(0).take(here).to_pylist()
    found = [json.loads(row).get(spec.column) if row else None for row in rows]
    widths = {len(one) for one in found if isinstance(one, list)}
    if len(widths) > 1:
        raise SpecError(
            f"dedup.column = '{spec.column}' has vectors of lengths {sorted(widths)}",
            fix="give vectors of one length",
        )
    vectors = np.full((len(rows), max(widths, default=0)), np.nan)
    for place, one in enumerate(found):
        if isinstance(one, list):
            try:
                vectors[place] = one
            except (TypeError, ValueError):
                raise SpecError(
                    f"dedup.column = '{spec.column}' has a list that is not of numbers: {str(one)[:80]}",
                    fix="name a field with embeddings",
                ) from None
    return vectors


def _embed(spec: Any, corpus: Corpus, shard: Path, first: int, chosen: np.ndarray) -> np.ndarray:
    """The model's vectors (float32 [k, D]) of the chosen documents of a shard, one document at a time: none depends on others."""
    embed = resolve("hone.data.dedup.embedding:opened")(spec.model, spec.device)
    made = [embed(text, spec.pooling, spec.max_tokens) for _, text in corpus.texts(shard, first, chosen)]
    return np.stack(made) if made else np.empty((0, 0), np.float32)
