"""Semantic deduplication: documents whose embeddings are nearly parallel, compared within k-means clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.base.lazy import lazy
from hone.base.spec import Circumstance
from hone.data.corpus import Corpus
from hone.data.dedup.base import Dedup, Found
from hone.data.dedup.semantics.kmeans import assign, centroids_of, prune

parquet = lazy("pyarrow.parquet")

_PER_CLUSTER = 1000
"""Documents of a cluster when their number is not set: comparing costs so many products a document, assigning n / 1000."""


class Semantic(Dedup):
    """Drops documents whose embedding has a cosine above 1 - epsilon with another's of its k-means cluster: SemDeDup. Abbas et al. 2023, arXiv:2303.09540.

    Embeddings are the mean (or last) final hidden state of a model folder, or a list of numbers in a copied field. In the
    order of `keep`, a document is dropped when an earlier one of its cluster is that near, whether that one stays or not, as
    in the paper. Memory of the calling process: 4 bytes a dimension of every document. Duplicates in different clusters are not found.
    """

    paper: ClassVar[str] = "arXiv:2303.09540"
    reason: ClassVar[str] = "semantic_duplicate"
    model: str = Field("", description="Model folder that embeds the documents (needs torch); or give `column`.")
    column: str = Field(
        "", description="One of metadata_fields with a list of numbers, all of one length, as embedding."
    )
    epsilon: float = Field(0.05, gt=0, lt=1, description="Documents of cosine above 1 - epsilon are duplicates.")
    clusters: int = Field(0, ge=0, description="Clusters of k-means; 0: one for a thousand documents.")
    keep: Literal["farthest", "nearest"] = Field(
        "farthest",
        description="The copy that stays: the one farthest from its cluster's centroid (as in the paper) or nearest to it.",
    )
    pooling: Literal["mean", "last"] = Field(
        "mean", description="How the hidden states of a document become one vector."
    )
    max_tokens: int = Field(512, ge=1, description="Tokens of a document that the model reads.")
    iterations: int = Field(20, ge=1, description="Iterations of k-means.")
    seed: int = Field(1, description="Seed of the first centroids.")
    device: Annotated[str, Circumstance()] = Field("cpu", description="Device of the model.")

    def files(self) -> dict[str, Path]:
        """The model's configuration, tokenizer and weights. Raises SpecError unless there is one source of vectors."""
        self._need_vectors()
        if not self.model:
            return {}
        folder = Path(self.model).expanduser()
        if not (folder / "config.json").is_file():
            raise SpecError(f"dedup.model = '{self.model}' is not a model folder", fix="give a folder with config.json")
        names = ("config.json", "tokenizer.json", *sorted(path.name for path in folder.glob("*.safetensors")))
        return {f"model/{name}": folder / name for name in names if (folder / name).is_file()}

    def _need_vectors(self) -> None:
        if bool(self.model) == bool(self.column):
            raise SpecError(
                "dedup 'semantic': give either model, a folder, or column, a field with vectors",
                fix="write {kind: semantic, column: embedding} with metadata_fields: [embedding], or model: FOLDER",
            )

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        """All kept documents."""
        return kept

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Writes the unit vectors (float32 [k, D]) and the numbers (int64 [k]) of the chosen documents of every shard, where missing."""
        self._need_vectors()
        for number, shard, first, end in corpus.spans():
            path = state / f"vectors-{number:05d}.npz"
            if path.exists():
                continue
            here = np.flatnonzero(chosen[first:end])
            vectors = self._read(shard, here) if self.column else self._embed(corpus, shard, first, chosen)
            found = np.isfinite(vectors).all(1) & (np.abs(vectors).sum(1) > 0) if len(vectors) else np.zeros(0, bool)
            vectors = vectors[found] / np.linalg.norm(vectors[found], axis=1, keepdims=True)
            temporary = path.with_suffix(".tmp.npz")
            np.savez(temporary, vectors=vectors.astype(np.float32), numbers=here[found] + first)
            temporary.rename(path)

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        self.prepare(corpus, kept, state)
        parts = [np.load(state / f"vectors-{number:05d}.npz") for number, *_ in corpus.spans()]
        held = [(part["vectors"], part["numbers"]) for part in parts if len(part["numbers"])]
        stands = np.arange(len(corpus))
        if not held:
            raise SpecError(
                f"dedup 'semantic': no document has a vector{f' in {self.column}' if self.column else ''}",
                fix="copy the field with metadata_fields, as a list of numbers",
            )
        if len(widths := {vectors.shape[1] for vectors, _ in held}) > 1:
            raise SpecError(
                f"dedup.column = '{self.column}' has vectors of lengths {sorted(widths)}",
                fix="give vectors of one length",
            )
        vectors, numbers = np.concatenate([one for one, _ in held]), np.concatenate([one for _, one in held])
        order = np.argsort(
            corpus.columns["id"][numbers], kind="stable"
        )  # so that nothing depends on the order of reading
        vectors, numbers = vectors[order], numbers[order]
        count = self.clusters or max(1, round(len(vectors) / _PER_CLUSTER))
        centroids = centroids_of(vectors, min(count, len(vectors)), self.iterations, self.seed)
        nearest, similarity = assign(vectors, centroids)
        found = prune(vectors, nearest, similarity if self.keep == "farthest" else -similarity, 1 - self.epsilon)
        stands[numbers] = numbers[found]
        sizes = np.bincount(nearest, minlength=len(centroids))
        figures = {
            "clusters": len(centroids),
            "largest_cluster": int(sizes.max()),
            "mean_cosine_to_centroid": round(float(similarity.mean()), 4),
            "documents_without_vector": int(kept.sum() - len(numbers)),
        }
        return Found(stands, {}, figures)

    def memory_bytes(self, documents: float) -> float:
        """Bytes of the vectors of `documents` in the calling process; 0 where their length is not known."""
        if not self.model:
            return 0.0
        width = json.loads((Path(self.model).expanduser() / "config.json").read_text(encoding="utf8")).get(
            "hidden_size", 0
        )
        return 2.0 * 4 * width * documents

    def _read(self, shard: Path, here: np.ndarray) -> np.ndarray:
        """The vectors (float64 [k, D]) in `column` of these documents of a shard; rows of NaN where there is none."""
        rows = parquet.read_table(shard, columns=["metadata"]).column(0).take(here).to_pylist()
        found = [json.loads(row).get(self.column) if row else None for row in rows]
        widths = {len(one) for one in found if isinstance(one, list)}
        if len(widths) > 1:
            raise SpecError(
                f"dedup.column = '{self.column}' has vectors of lengths {sorted(widths)}",
                fix="give vectors of one length",
            )
        vectors = np.full((len(rows), max(widths, default=0)), np.nan)
        for place, one in enumerate(found):
            if isinstance(one, list):
                try:
                    vectors[place] = one
                except (TypeError, ValueError):
                    raise SpecError(
                        f"dedup.column = '{self.column}' has a list that is not of numbers: {str(one)[:80]}",
                        fix="name a field with embeddings",
                    ) from None
        return vectors

    def _embed(self, corpus: Corpus, shard: Path, first: int, chosen: np.ndarray) -> np.ndarray:
        """The model's vectors (float32 [k, D]) of the chosen documents of a shard, one document at a time: none depends on others."""
        try:
            import torch  # noqa: F401
        except ImportError:
            raise MissingExtra.of("dedup 'semantic' with a model", "torch", "models") from None
        from hone.data.dedup.semantics.embedding import opened

        embed = opened(self.model, self.device)
        made = [embed(text, self.pooling, self.max_tokens) for _, text in corpus.texts(shard, first, chosen)]
        return np.stack(made) if made else np.empty((0, 0), np.float32)
