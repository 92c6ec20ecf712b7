"""Seeds: the good and bad examples that a quality model learns from, and which of them it is tested on instead."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from hone.base.errors import SpecError
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
