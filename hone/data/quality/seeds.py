"""Seeds: the good and bad examples that a quality model learns from, and which of them it is tested on instead."""

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
from hone.data.readers.documents import Document, Options
from hone.data.readers.listing import Listing, list_source
from hone.data.readers.read import read_file

_LEAST = 10


class Examples(NamedTuple):
    """`texts` with `targets` (bool: good) and `held` (bool: only for testing). Pieces of one document are on one side."""

    texts: list[str]
    targets: np.ndarray
    held: np.ndarray
    num_documents: tuple[int, int]  # good, bad
    num_broken: int

    def figures(self, scores: np.ndarray) -> dict[str, float]:
        """How well `scores` of the held-out texts, in their order, tell good from bad, and how many documents there were."""
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
    """What a model's files say of it: the hash of the spec and seeds it was made from, and its figures."""

    made_by: str
    figures: dict[str, float]


class Seeded(Scorer):
    """Base of the scorers that learn from good and bad texts. A subclass says how, and how its files are read."""

    version: ClassVar[int] = 1
    """Counts up when the same spec and seeds make another model."""

    high: tuple[str, ...] = Field((), description="Files or folders of good texts.")
    low: tuple[str, ...] = Field((), description="Files or folders of bad texts.")
    text_field: str = Field("text", description="Field of JSON rows, column of Parquet tables that holds the text.")
    held_out: float = Field(0.1, gt=0, lt=1, description="Share of the documents of each side for testing only.")
    piece_chars: int = Field(4000, ge=100, description="Longer seeds are cut into pieces, each an example.")
    max_bytes: int = Field(50_000_000, gt=0, description="Most text of each side to learn from, chosen by hash.")
    seed: int = Field(0, ge=0, description="Of whatever is drawn at random: first weights, the order of the seeds.")

    def train(self, folder: Path) -> dict[str, float]:
        """Writes the model's files into `folder` unless they are there, made by this spec from these seeds; returns auc,
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
            pass  # none, or half of an older one; it is made again
        examples = read_examples(sides, self.text_field, self.held_out, self.piece_chars, self.max_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        self.fit(examples, made_by.hexdigest(), folder)
        return self.known(folder).figures

    def need(self) -> None:
        """Raises MissingExtra when a package that training needs is not installed."""

    def known(self, folder: Path) -> Known:
        """What the model in `folder` says of itself. Raises ArtifactError when there is none, or a damaged one."""
        raise NotImplementedError

    def fit(self, examples: Examples, made_by: str, folder: Path) -> None:
        """Learns from the examples that are not held out and writes the model into `folder`, so that a kill leaves none."""
        raise NotImplementedError


def listings(high: tuple[str, ...], low: tuple[str, ...]) -> tuple[Listing, Listing]:
    """The files of both sides. Raises SpecError for a side that names nothing or files that are not there."""
    for name, paths in (("high", high), ("low", low)):
        if not paths:
            raise SpecError(
                f"scorer.{name} names no file", fix=f"give {name}: files of {'good' if name == 'high' else 'bad'} texts"
            )
    return list_source(high), list_source(low)


def read_examples(
    sides: tuple[Listing, Listing], text_field: str, held_fraction: float, piece_chars: int, max_bytes: int
) -> Examples:
    """Documents of both sides, each text once. Longer ones are cut into pieces of `piece_chars`, each an example.

    Documents stand in the order of their hashes, which is as good as random: of a side the first `max_bytes` are taken,
    and of these the last `held_fraction` are held out. Raises SpecError for fewer than 10 documents, or one on both sides.
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
                if not isinstance(item, Document):
                    broken[item.reason] += 1
                elif item.text.strip():
                    found[hashlib.blake2b(item.text.encode(), digest_size=16).digest()] = item.text
        both = found.keys() & known.keys()
        if both:
            raise SpecError(
                f"{len(both)} texts stand in both scorer.high and scorer.low, for example {found[min(both)][:60]!r}",
                fix="take them out of one of the two",
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
                f"scorer.{name} gives {len(chosen)} different documents, too few to learn from"
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
    """`text` cut at spaces into about equal pieces of at most `most` letters."""
    number = -(-len(text) // most)
    size = -(-len(text) // number)
    pieces = []
    while len(text) > most:
        cut = text.rfind(" ", 1, size + 1)
        cut = cut if cut > size // 2 else size
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]
