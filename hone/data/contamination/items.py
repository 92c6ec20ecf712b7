"""Decontamination by items: finds question, choices and answer as one text, also when a word or the punctuation has changed."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.data.contamination.evaluation import Example, read_evaluations
from hone.data.contamination.ngrams import HIT, Index, NGrams, too_short
from hone.data.corpus import Corpus
from hone.data.edits.rows import save
from hone.text.batch import Texts

_LONG_SEED, _SHORT_SEED = 6, 4
_MAX_POSTINGS = 64
"""Seeds in more units than this are common phrases of the evaluation sets and not looked up."""
_PROMPT_SHARE, _PROMPT_EXAMPLES = 0.25, 20
"""A beginning that so many of a set's examples share, of at least so many, is a prompt and no part of them."""


class Seeds(NamedTuple):
    """The units of all items and the runs of words by which they are found; the arguments of `align.matches_of`.

    Seed k of `keys` uint64 (sorted) begins at word place[begins[k]:begins[k + 1]] of units unit[...]. Unit u is the words
    items[first[u]:first[u + 1]] (uint64) of example owner[u], `letters` bool says which have a letter, `how` how it is matched.
    """

    lengths: np.ndarray
    keys: np.ndarray
    begins: np.ndarray
    unit: np.ndarray
    place: np.ndarray
    items: np.ndarray
    letters: np.ndarray
    first: np.ndarray
    how: np.ndarray
    owner: np.ndarray


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
    shortest: int = Field(8, ge=_SHORT_SEED, description="Least words of an item that is searched for.")
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
        index = Index(
            everyone.astype(np.uint64) + np.uint64(1),
            np.append(everyone, len(examples)),
            everyone,
            seeds.lengths,
            count,
        )
        return examples, index, warnings

    def _planned(self) -> tuple[list[Example], Seeds, list[str]]:
        stamp = self._stamp()
        return _read_and_plan(self.evaluations, self.fields, max(self.words, self.shortest), self.shortest, stamp)

    def _search(self, corpus: Corpus, chosen: np.ndarray, state: Path, index: Index) -> list[np.ndarray]:
        _, seeds, _ = self._planned()
        align = _kernels("align")
        table, bits = _kernels("match").table_of(seeds.keys)
        told = b"".join(part.tobytes() for part in seeds) + f"{self.words} {self.coverage}".encode()
        which = hashlib.blake2b(told, digest_size=8).hexdigest()
        found = []
        for number, shard, first, _ in corpus.spans():
            path = state / f"items-{which}-{number:05d}.npy"
            if not path.exists():
                parts = [np.empty(0, HIT)]
                for indices, texts in corpus.batches(shard, first, chosen):
                    settings = (self.words, self.coverage, align.item_table())
                    text, start, end, unit = align.matches_of(
                        *texts, seeds.lengths, table, bits, *seeds[1:-1], *settings
                    )
                    rows = np.empty(len(text), HIT)
                    rows["document"], rows["start"], rows["end"] = indices[text], start, end
                    rows["key"] = seeds.owner[unit] + 1
                    parts.append(rows)
                save(path, np.concatenate(parts))
            found.append(np.load(path))
        return found


@functools.lru_cache(maxsize=1)
def _read_and_plan(
    evaluations: tuple[str, ...], fields: tuple[str, ...], words: int, shortest: int, stamp: tuple
) -> tuple[list[Example], Seeds, list[str]]:
    """The examples, their units and seeds, and what to warn of. Raises SpecError when no item is long enough.

    `stamp` identifies the files' state, so that changed files are read again.
    """
    align = _kernels("align")
    examples = read_evaluations(evaluations, fields, items=True)
    counts = [len(example.texts) for example in examples]
    texts = Texts.of([text for example in examples for text in example.texts])
    words_in, has_letter, first = align.words_of(*texts, align.item_table())
    begin = np.concatenate([[0], np.cumsum(counts)])
    bounds = [first[begin[number] : begin[number + 1] + 1] for number in range(len(examples))]
    skipped = _prompts([example.evaluation for example in examples], [words_in[at[0] : at[-1]] for at in bounds])
    units: list[tuple[int, int, int, int]] = []  # (first word, last, how, example)
    for number, (at, skip) in enumerate(zip(bounds, skipped)):
        low, high = int(at[0]) + skip, int(at[-1])
        if high - low >= shortest:
            units.append((low, high, align.ANY if high - low >= words else align.NEARLY, number))
        if counts[number] > 1:
            for part, (one, other) in enumerate(zip(at[:-1].tolist(), at[1:].tolist())):
                size = other - max(one, low)
                if size >= (words if part else shortest):  # a choice of ten words is often a plain fact
                    units.append((max(one, low), other, align.ANY if size >= words else align.EXACT, number))
    long_enough = np.zeros(len(examples), bool)
    long_enough[[unit[3] for unit in units]] = True
    short = [example for example, enough in zip(examples, long_enough.tolist()) if not enough]
    warnings = too_short(short, len(examples), shortest)
    if not units:
        raise SpecError(
            f"no item of {len(examples)} evaluation examples has {shortest} words",
            fix="lower shortest, or name other fields",
        )
    sizes = np.array([high - low for low, high, *_ in units])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    items = np.concatenate([words_in[low:high] for low, high, *_ in units])
    letters = np.concatenate([has_letter[low:high] for low, high, *_ in units])
    seed_sizes = np.where(sizes >= words, _LONG_SEED, _SHORT_SEED)
    key, unit, place = align.seeds_of(items, starts, seed_sizes)
    order = np.argsort(key, kind="stable")
    keys, begins, counts = np.unique(key[order], return_index=True, return_counts=True)
    rare = counts <= _MAX_POSTINGS
    order = order[np.repeat(rare, counts)]
    begins = np.concatenate([[0], np.cumsum(counts[rare])])
    how, owner = (np.array([unit[column] for unit in units]) for column in (2, 3))
    seeds = Seeds(
        np.unique(seed_sizes), keys[rare], begins, unit[order], place[order], items, letters, starts, how, owner
    )
    return examples, seeds, warnings


def _prompts(sets: list[str], words: list[np.ndarray]) -> list[int]:
    """How many words at the beginning of each example are a prompt that many examples of its set begin with."""
    skipped = [0] * len(words)
    groups = defaultdict(list)
    for number, name in enumerate(sets):
        groups[name].append(number)
    for numbers in groups.values():
        least = max(_PROMPT_EXAMPLES, _PROMPT_SHARE * len(numbers))
        size = 1
        while len(numbers) >= least:
            beginnings = Counter(words[number][:size].tobytes() for number in numbers if len(words[number]) > size)
            numbers = [number for number in numbers if beginnings[words[number][:size].tobytes()] >= least]
            for number in numbers:
                skipped[number] = size
            size += 1
    return skipped


def _kernels(name: str) -> ModuleType:
    """The compiled kernels. Raises MissingExtra without numba."""
    try:
        if name == "align":
            from hone.text.contamination import align

            return align
        from hone.text.contamination import match
    except ImportError as error:
        if error.name != "numba":
            raise
        raise MissingExtra.of("decontamination", "numba", "data") from None
    return match
