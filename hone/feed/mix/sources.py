"""Sources: the text of a training by source, from one data artifact or several, and its feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.errors import SpecError
from hone.feed.load import Batch, Feed, PackedTokens, Part, shuffled
from hone.feed.mix.base import Chosen, Mixture, Source
from hone.feed.mix.mixed import MixedTokens
from hone.feed.mix.proportional import Proportional
from hone.feed.order.base import Curriculum
from hone.feed.order.documents import named, texts_of
from hone.feed.order.ordered import OrderedTokens
from hone.model.tokenizer import tokenizers_differ


class Joined:
    """Validation text of several sources as one: sequences in stored order, those of the sources interleaved evenly."""

    def __init__(self, parts: Mapping[str, PackedTokens]) -> None:
        self.parts = list(parts.values())

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def scored(self) -> tuple[int, int]:
        tokens, num_bytes = zip(*(part.scored for part in self.parts))
        return sum(tokens), sum(num_bytes)

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of `seq_len` tokens in one epoch."""
        return sum(part.num_sequences(seq_len) for part in self.parts)

    def in_order(self, batch_size: int, seq_len: int) -> Iterator[Batch]:
        """One epoch; its first sequences, however many, hold every source in its share."""
        counts = [part.num_sequences(seq_len) for part in self.parts]
        owner = np.repeat(np.arange(len(counts)), counts)
        window = np.concatenate([np.arange(count) for count in counts])
        order = np.lexsort((owner, (window + 0.5) / np.maximum(np.array(counts)[owner], 1)))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            rows = [self.parts[owner[place]].cut(window[place : place + 1], seq_len) for place in chosen]
            yield Batch(*(np.concatenate(arrays) for arrays in zip(*rows)))


class Sources:
    """Training and validation text by source: one per data folder, or one per value of a column of a single folder.

    `folders` maps a name to the folder of a data artifact; with one folder and `by`, its documents are split by that
    column. Raises SpecError when the folders have different tokenizers.
    """

    def __init__(self, folders: Mapping[str, Path], by: str | None = None) -> None:
        whole = {
            split: {name: PackedTokens(folder, split) for name, folder in folders.items()} for split in ("train", "val")
        }
        if len(folders) == 1:
            (self.train,) = whole["train"].values()
            (self.val,) = whole["val"].values()
            self.parts = {**whole["train"]} if by is None else by_column(self.train, by)
            self.val_parts = {**whole["val"]} if by is None else by_column(self.val, by)
        else:
            self.parts, self.val_parts = whole["train"], whole["val"]
            self.train, self.val = next(iter(self.parts.values())), Joined(self.val_parts)
            self._same_tokens()

    @property
    def num_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(part.num_tokens for part in self.parts.values())

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of `seq_len` tokens in one epoch of all sources."""
        return sum(part.num_sequences(seq_len) for part in self.parts.values())

    def choose(self, mixture: Mixture | None, total: int, seq_len: int) -> Chosen | None:
        """The share of every source in a training of `total` sequences; None for a single source without a mixture.

        Several data folders without a mixture are read in proportion to their tokens, whatever the number of epochs.
        Raises SpecError when there is nothing to mix.
        """
        if mixture is None and len(self.parts) == 1:
            return None
        if len(self.parts) < 2:
            found = f"one source, '{next(iter(self.parts))}'" if self.parts else "no source with text"
            raise SpecError(
                f"mixture '{mixture and mixture.kind}' has {found}: there is nothing to mix",
                fix="give several data inputs (data.NAME: FOLDER), set mixture.by to a column with several values, or drop it",
            )
        rows = [
            Source(name, part.num_tokens, _sampler(part), part.num_sequences(seq_len) * seq_len)
            for name, part in self.parts.items()
        ]
        return (mixture or Proportional(kind="proportional", max_epochs=float("inf"))).weigh(rows, total * seq_len)

    def feed(
        self,
        chosen: Chosen | None,
        curriculum: Curriculum,
        total: int,
        seq_len: int,
        seed: int,
        begins: Mapping[str, int] | None = None,
    ) -> Feed:
        """The feed of a training of `total` sequences; every source is read in the order of `curriculum`.

        `begins` is the sequence of each source's order that is its first in this training, where it is not 0. Raises SpecError
        when the curriculum does not fit one of the sources.
        """
        if chosen is None:
            (begin,) = (begins or {}).values() or (0,)
            whole = OrderedTokens(self.train, curriculum, total, begin)
            whole.order(seq_len, seed)
            return whole
        totals = self.totals(chosen, total, seed)
        ordered = {
            name: OrderedTokens(part, curriculum, totals[name], (begins or {}).get(name, 0))
            for name, part in self.parts.items()
        }
        for feed in ordered.values():
            if feed.total:
                feed.order(seq_len, seed)
        return MixedTokens(ordered, chosen.weights)

    def totals(self, chosen: Chosen | None, num_sequences: int, seed: int) -> dict[str, int]:
        """How many of the first `num_sequences` of a training are of each source."""
        if chosen is None:
            return dict.fromkeys(self.parts, num_sequences)
        found = MixedTokens(self.parts, chosen.weights).totals(num_sequences, seed)
        return {name: found.get(name, 0) for name in self.parts}

    def epochs(self, chosen: Chosen, total: int, seq_len: int, seed: int) -> dict[str, float]:
        """Epochs of each source's sequences in a training of `total` sequences, by count."""
        totals = MixedTokens(self.parts, chosen.weights).totals(total, seed)
        return {name: count / self.parts[name].num_sequences(seq_len) for name, count in totals.items()}

    def _same_tokens(self) -> None:
        first, *others = self.parts.values()
        for other in others:
            marks = [(data.vocab_size, data.eos_token_id) for data in (first, other)]
            if marks[0] != marks[1] or tokenizers_differ(first.folder, other.folder):
                raise SpecError(
                    f"{first.folder} and {other.folder} have different tokenizers",
                    fix=f"tokenize the second with tokenizer: {{path: {first.folder}}}",
                )


def by_column(data: PackedTokens, by: str) -> dict[str, PackedTokens]:
    """The documents of `data` split by a column of names, in order of the names; without sources of less than two tokens."""
    known, codes = named(data.columns(by)[by], f"mixture.by = '{by}'")
    order = np.argsort(codes, kind="stable")
    borders = np.cumsum(np.bincount(codes, minlength=len(known)))[:-1]
    parts = {name: data.part(documents) for name, documents in zip(known, np.split(order, borders))}
    return {name: part for name, part in parts.items() if part.num_tokens > 1}


def _sampler(data: PackedTokens) -> Any:
    def sample(count: int) -> list[str]:
        places = np.sort(shuffled(data.num_documents, 0)[:count])
        return texts_of(data.folder, data.split, data.numbers[places] if isinstance(data, Part) else places)

    return sample
