"""Seeds: the good and bad examples of a quality model, split into training and test."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.errors import ArtifactError, SpecError
from hone.data.quality.base import Scorer, area_under_curve
from hone.feed.files.listing import Listing, list_source
from hone.readers.documents import Broken, Document, Options
from hone.readers.read import read_file

_LEAST = 10


class Examples(NamedTuple):
    """`texts` with `targets` (bool: good) and `held` (bool: only for testing). Pieces of one document are in one split."""

    texts: list[str]
    targets: np.ndarray
    held: np.ndarray
    num_documents: tuple[int, int]  # good, bad
    num_broken: int

    def figures(self, scores: np.ndarray) -> dict[str, float]:
        """How well `scores` of the held-out texts, in their order, separate good from bad, and the numbers of documents."""
        truth = self.targets[self.held]
        return {
            "auc": area_under_curve(truth, scores),
            "accuracy": float(((scores >= 0.5) == truth).mean()),
            "held_out": len(truth),
            "high_documents": self.num_documents[0],
            "low_documents": self.num_documents[1],
            "broken_documents": self.num_broken,
        }


class Known(NamedTuple):
    """What a model's files record: the hash of its spec and seeds, and its figures."""

    made_by: str
    figures: dict[str, float]


class Seeded(Scorer):
    """Base of scorers trained on good and bad texts. A subclass trains the model and reads its files."""

    version: ClassVar[int] = 1
    """Incremented when the same spec and seeds give another model."""

    high: tuple[str, ...] = Field((), description="Files or folders of good texts.")
    low: tuple[str, ...] = Field((), description="Files or folders of bad texts.")
    text_field: str = Field("text", description="Field of JSON rows, column of Parquet tables that holds the text.")
    held_out: float = Field(0.1, gt=0, lt=1, description="Share of the documents of each class for testing only.")
    piece_chars: int = Field(4000, ge=100, description="Longer seeds are cut into pieces, each an example.")
    max_bytes: int = Field(50_000_000, gt=0, description="Most training text of each class, chosen by hash.")
    seed: int = Field(0, ge=0, description="Seed of initial weights and of the order of examples.")

    def train(self, folder: Path) -> dict[str, float]:
        """Writes the model's files into `folder` unless those of the same spec and seeds exist; returns auc,
        accuracy (both of held-out documents) and the numbers of documents."""
        self.need()
        sides = listings(self.high, self.low)
        made_by = hashlib.blake2b(digest_size=16)
        made_by.update(json.dumps([self.version, self.model_dump(mode="json", exclude={"high", "low"})]).encode())
        for side in sides:
            made_by.update(side.digest.encode())
        try:
            known = self.known(folder)
            if known.made_by == made_by.hexdigest():
                return known.figures
        except ArtifactError:
            pass  # missing, or an unfinished older one: it is trained again
        examples = read_examples(sides, self.text_field, self.held_out, self.piece_chars, self.max_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        self.fit(examples, made_by.hexdigest(), folder)
        return self.known(folder).figures

    def need(self) -> None:
        """Raises MissingExtra when a package that training needs is not installed."""

    def known(self, folder: Path) -> Known:
        """What the files of the model in `folder` record. Raises ArtifactError when they are missing or damaged."""
        raise NotImplementedError

    def fit(self, examples: Examples, made_by: str, folder: Path) -> None:
        """Trains on the examples that are not held out and writes the model into `folder`, atomically."""
        raise NotImplementedError


def listings(high: tuple[str, ...], low: tuple[str, ...]) -> tuple[Listing, Listing]:
    """The files of both classes. Raises SpecError for a class without files or files that do not exist."""
    for name, paths in (("high", high), ("low", low)):
        if not paths:
            raise SpecError(
                f"scorer.{name} names no file", fix=f"give {name}: files of {'good' if name == 'high' else 'bad'} texts"
            )
    return list_source(high), list_source(low)


def read_examples(
    sides: tuple[Listing, Listing], text_field: str, held_fraction: float, piece_chars: int, max_bytes: int
) -> Examples:
    """Documents of both classes, each text once. Longer ones are cut into pieces of `piece_chars`, each an example.

    Documents are ordered by their hashes, which is as good as random: of a class the first `max_bytes` are taken,
    and of these the last `held_fraction` are held out. Raises SpecError for fewer than 10 documents, or one in both classes.
    """
    texts: list[str] = []
    targets: list[bool] = []
    held: list[bool] = []
    numbers = []
    broken: Counter[str] = Counter()
    known: dict[bytes, str] = {}
    for name, listing in zip(("high", "low"), sides):
        found = {}
        for file in listing.files:
            for item in read_file(file, Options(text_field=text_field)):
                if isinstance(item, Broken):
                    broken[item.reason] += 1
                elif isinstance(item, Document) and item.text.strip():
                    found[hashlib.blake2b(item.text.encode(), digest_size=16).digest()] = item.text
        both = found.keys() & known.keys()
        if both:
            raise SpecError(
                f"{len(both)} texts are in both scorer.high and scorer.low, for example {found[min(both)][:60]!r}",
                fix="remove them from one of the two",
            )
        known.update(found)
        chosen, size = [], 0
        for digest in sorted(found):
            size += len(found[digest].encode())
            if size > max_bytes and len(chosen) >= _LEAST:
                break
            chosen.append(found[digest])
        if len(chosen) < _LEAST:
            raise SpecError(
                f"scorer.{name} gives {len(chosen)} distinct documents, too few to train on"
                + "".join(f"; {count} {reason}" for reason, count in sorted(broken.items())),
                fix=f"give at least {_LEAST}; a long text can be cut into rows of a .jsonl file",
            )
        first_held = len(chosen) - max(1, round(held_fraction * len(chosen)))
        for place, text in enumerate(chosen):
            for piece in _pieces(text, piece_chars):
                texts.append(piece)
                targets.append(name == "high")
                held.append(place >= first_held)
        numbers.append(len(chosen))
    return Examples(texts, np.array(targets), np.array(held), (numbers[0], numbers[1]), broken.total())


def _pieces(text: str, most: int) -> list[str]:
    """`text` cut at spaces into about equal pieces of at most `most` characters."""
    number = -(-len(text) // most)
    size = -(-len(text) // number)
    pieces = []
    while len(text) > most:
        cut = text.rfind(" ", 1, size + 1)
        cut = cut if cut > size // 2 else size
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]
