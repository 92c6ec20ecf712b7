"""Seeds: the units of evaluation items, and the runs of words by which they are found in documents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hone.text.batch import Texts
from hone.text.contamination.align import ANY, EXACT, NEARLY, item_table, matches_of, seeds_of, words_of
from hone.text.contamination.index import hits
from hone.text.contamination.match import table_of

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


def seeds_of_items(texts: Texts, counts: Sequence[int], sets: Sequence[str], words: int, shortest: int) -> Seeds | None:
    """The seeds of examples: example i has the next counts[i] of `texts` and belongs to set sets[i]. None when no unit is long enough.

    A unit is an example's texts joined, from `shortest` words on, or one of its texts of `words` words, the first from `shortest` on.
    """
    words_in, has_letter, first = words_of(*texts, item_table())
    begin = np.concatenate([[0], np.cumsum(counts)])
    bounds = [first[begin[number] : begin[number + 1] + 1] for number in range(len(counts))]
    skipped = _prompts(sets, [words_in[at[0] : at[-1]] for at in bounds])
    units: list[tuple[int, int, int, int]] = []  # (first word, last, how, example)
    for number, (at, skip) in enumerate(zip(bounds, skipped)):
        low, high = int(at[0]) + skip, int(at[-1])
        if high - low >= shortest:
            units.append((low, high, ANY if high - low >= words else NEARLY, number))
        if counts[number] > 1:
            for part, (one, other) in enumerate(zip(at[:-1].tolist(), at[1:].tolist())):
                size = other - max(one, low)
                if size >= (words if part else shortest):  # a choice of ten words is often a plain fact
                    units.append((max(one, low), other, ANY if size >= words else EXACT, number))
    if not units:
        return None
    sizes = np.array([high - low for low, high, *_ in units])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    items = np.concatenate([words_in[low:high] for low, high, *_ in units])
    letters = np.concatenate([has_letter[low:high] for low, high, *_ in units])
    seed_sizes = np.where(sizes >= words, _LONG_SEED, _SHORT_SEED)
    key, unit, place = seeds_of(items, starts, seed_sizes)
    order = np.argsort(key, kind="stable")
    keys, begins, spread = np.unique(key[order], return_index=True, return_counts=True)
    rare = spread <= _MAX_POSTINGS
    order = order[np.repeat(rare, spread)]
    begins = np.concatenate([[0], np.cumsum(spread[rare])])
    how, owner = (np.array([unit[column] for unit in units]) for column in (2, 3))
    return Seeds(
        np.unique(seed_sizes), keys[rare], begins, unit[order], place[order], items, letters, starts, how, owner
    )


def finder(seeds: Seeds, words: int, coverage: float) -> Callable[[np.ndarray, Texts], np.ndarray]:
    """A function of documents' indices (int [num_texts]) and Texts that finds the hits (HIT [k]) of `seeds` in them; a key is the example + 1."""
    table, bits = table_of(seeds.keys)

    def find(indices: np.ndarray, texts: Texts) -> np.ndarray:
        settings = (words, coverage, item_table())
        text, start, end, unit = matches_of(*texts, seeds.lengths, table, bits, *seeds[1:-1], *settings)
        return hits(indices[text], start, end, seeds.owner[unit] + 1)

    return find


def _prompts(sets: Sequence[str], words: Sequence[np.ndarray]) -> list[int]:
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
