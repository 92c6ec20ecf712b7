"""Semantic deduplication: documents whose embeddings are nearly parallel, compared within k-means clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.base.lazy import resolve
from hone.base.spec import Circumstance
from hone.data.dedup.base import Dedup

if TYPE_CHECKING:
    from hone.data.corpus import Corpus
    from hone.data.dedup.groups import Found


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
        self.need_vectors()
        if not self.model:
            return {}
        folder = Path(self.model).expanduser()
        if not (folder / "config.json").is_file():
            raise SpecError(f"dedup.model = '{self.model}' is not a model folder", fix="give a folder with config.json")
        names = ("config.json", "tokenizer.json", *sorted(path.name for path in folder.glob("*.safetensors")))
        return {f"model/{name}": folder / name for name in names if (folder / name).is_file()}

    def need_vectors(self) -> None:
        """Raises SpecError unless there is one source of vectors, and MissingExtra for a model without torch."""
        if bool(self.model) == bool(self.column):
            raise SpecError(
                "dedup 'semantic': give either model, a folder, or column, a field with vectors",
                fix="write {kind: semantic, column: embedding} with metadata_fields: [embedding], or model: FOLDER",
            )
        if self.model:
            MissingExtra.need("dedup 'semantic' with a model", "torch", "models")

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Writes the vectors of the chosen documents of every shard, where missing."""
        self.need_vectors()
        resolve("hone.data.dedup.vectors:write_vectors")(self, corpus, chosen, state)

    def compare(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        self.prepare(corpus, kept, state)
        return resolve("hone.data.dedup.vectors:compare")(self, corpus, kept, state)

    def memory_bytes(self, documents: float) -> float:
        """Bytes of the vectors of `documents` in the calling process; 0 where their length is not known."""
        if not self.model:
            return 0.0
        width = json.loads((Path(self.model).expanduser() / "config.json").read_text(encoding="utf8")).get(
            "hidden_size", 0
        )
        return 2.0 * 4 * width * documents
