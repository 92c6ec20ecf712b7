"""Decontamination by items: finds question, choices and answer as one text, also when a word or the punctuation has changed."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.contamination.evaluation import Example, read_evaluations
from hone.data.contamination.ngrams import NGrams, search, too_short
from hone.data.edits.cuts import compiled
from hone.text.batch import Texts

if TYPE_CHECKING:
    from hone.data.corpus import Corpus
    from hone.text.contamination.index import Index
    from hone.text.contamination.seeds import Seeds

_INDEX = ("hone.text.contamination.index", "decontamination")
_SEEDS = ("hone.text.contamination.seeds", "decontamination")


class Items(NGrams):
    """Finds documents that contain an evaluation item as it is asked, with light edits. Brown et al. 2020, arXiv:2005.14165.

    An item is its texts joined (question, choices, answer; without `fields`, ids and labels are left out), without a beginning
    that a quarter of its set shares. It is found by `words` words in a row, as in the paper, or when `coverage` of its words
    are aligned with the document: words may be changed, and a few inserted between its parts, such as the letters of choices.
    Texts of at least `words` words are also looked for on their own. Items of `shortest` to `words` - 1 words are found when at most one
    word differs, a question of so few words on its own only word for word. What is matched must have five different words with a letter, so
    that runs of numbers do not match. Case, punctuation, white space, names of LaTeX commands and single letters up to j
    (of choices) are ignored. Alignment begins at runs
    of six equal words (four for short items) and is greedy, as in BLAST (Altschul et al. 1990, doi:10.1016/S0022-2836(05)80360-2).
    """

    paper: ClassVar[str] = "arXiv:2005.14165"
    shortest: int = Field(8, ge=4, description="Least words of an item that is searched for.")
    coverage: float = Field(0.8, gt=0.5, le=1, description="Least share of an item's words that are found in order.")
    max_documents: int | None = Field(
        None,
        ge=1,
        description="Items in more documents than this are common texts and ignored; none: no item is ignored.",
    )

    def _indexed(self) -> tuple[list[Example], Index, list[str]]:
        examples, seeds, warnings = self._planned()
        count = np.bincount(seeds.owner, minlength=len(examples))
        everyone = np.arange(len(examples))
        keys, first = everyone.astype(np.uint64) + np.uint64(1), np.append(everyone, len(examples))
        index = compiled(*_INDEX).Index(keys, first, everyone, seeds.lengths, count)
        return examples, index, warnings

    def _planned(self) -> tuple[list[Example], Seeds, list[str]]:
        stamp = self._stamp()
        return _read_and_plan(self.evaluations, self.fields, max(self.words, self.shortest), self.shortest, stamp)

    def _search(self, corpus: Corpus, chosen: np.ndarray, state: Path, index: Index) -> list[np.ndarray]:
        _, seeds, _ = self._planned()
        told = b"".join(part.tobytes() for part in seeds) + f"{self.words} {self.coverage}".encode()
        which = hashlib.blake2b(told, digest_size=8).hexdigest()
        find = compiled(*_SEEDS).finder(seeds, self.words, self.coverage)
        return search(corpus, chosen, state, f"items-{which}", find)


@functools.lru_cache(maxsize=1)
def _read_and_plan(
    evaluations: tuple[str, ...], fields: tuple[str, ...], words: int, shortest: int, stamp: tuple
) -> tuple[list[Example], Seeds, list[str]]:
    """The examples, their units and seeds, and what to warn of. Raises SpecError when no item is long enough.

    `stamp` identifies the files' state, so that changed files are read again.
    """
    made = compiled(*_SEEDS)
    examples = read_evaluations(evaluations, fields, items=True)
    texts = Texts.of([text for example in examples for text in example.texts])
    counts = [len(example.texts) for example in examples]
    seeds = made.seeds_of_items(texts, counts, [example.evaluation for example in examples], words, shortest)
    if seeds is None:
        raise SpecError(
            f"no item of {len(examples)} evaluation examples has {shortest} words",
            fix="lower shortest, or name other fields",
        )
    short = set(range(len(examples))) - set(seeds.owner.tolist())
    return examples, seeds, too_short([examples[number] for number in sorted(short)], len(examples), shortest)
