"""The base of edits, which find byte spans to cut out of documents, or to write something else for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import field_validator

from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts, cut_whole, figures
from hone.data.edits.rows import save
from hone.data.expression import evaluate, need_sense
from hone.data.signals import column_kinds
from hone.text.batch import Texts


class Edit(Technique):
    """Cuts spans out of documents. What is cut depends on texts and document ids alone, never on the order of reading."""

    reason: ClassVar[str] = "nothing_left"
    discloses: ClassVar[bool] = True
    """Whether samples may show what was cut."""
    when: str
    min_left_bytes: int

    @field_validator("when", check_fields=False)
    @classmethod
    def _makes_sense(cls, value: str) -> str:
        need_sense(value, column_kinds())
        return value

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        """Which documents are read (bool [num_documents])."""
        return kept & evaluate(self.when, corpus.columns)

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path) -> list[Cuts]:
        """The cuts of each shard, as byte offsets in the texts that `corpus` returns now (`join` appends them to earlier ones).

        Only documents where `kept` (bool [num_documents]) are compared. A document to drop is cut as a whole. Files in the
        folder `state` are reused by a resumed run.
        """
        raise NotImplementedError

    def figures(self, corpus: Corpus, cuts: Sequence[Cuts], state: Path) -> dict[str, Any]:
        """Counts for stats.json, after `cuts` with the same `state`."""
        return figures(cuts)


SPACED_LINES = "kind != 'code' and language not in ('zh', 'ja', 'th', 'lo', 'km', 'my')"
"""Where rules about the words of a line apply: prose in languages with spaces between words."""
_SPAN = np.dtype([("document", np.int64), ("start", np.int64), ("end", np.int64), ("rule", np.int64)])


class Spans(NamedTuple):
    """What was found in a batch: `text`, byte offsets `start` and `end` in it, and `rule`, each int64 [k]; `seen`: units looked at."""

    text: np.ndarray
    start: np.ndarray
    end: np.ndarray
    rule: np.ndarray
    seen: int


class ByShard(Edit):
    """Cuts or replaces what `find` finds in every document; counts per rule are in stats.json."""

    unit: ClassVar[str]
    """What `Spans.seen` counts."""

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names of the rules that `find` numbers."""
        raise NotImplementedError

    @property
    def fills(self) -> np.ndarray:
        """What is written in the place of a span, for each rule (numpy S)."""
        return np.zeros(len(self.rule_names), "S1")

    def find(self, texts: Texts) -> Spans:
        """The spans of a batch."""
        raise NotImplementedError

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Finds the spans of each shard of `corpus`, unless they are in `state`; `corpus` may be some of the shards."""
        for number, shard, first, _ in corpus.spans():
            path = state / f"spans-{number:05d}.npy"
            if path.exists():
                continue
            parts, seen = [np.empty(0, _SPAN)], 0
            for indices, texts in corpus.batches(shard, first, chosen):
                found = self.find(texts)
                rows = np.empty(len(found.text), _SPAN)
                rows["document"], rows["rule"] = indices[found.text], found.rule
                rows["start"], rows["end"] = found.start, found.end
                parts.append(rows)
                seen += found.seen
            save(state / f"seen-{number:05d}.npy", np.array([seen], np.int64))
            save(path, np.concatenate(parts))

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path) -> list[Cuts]:
        self.prepare(corpus, self.takes_part(corpus, kept), state)
        made = []
        for number, _, first, end in corpus.spans():
            rows = np.load(state / f"spans-{number:05d}.npy")
            cuts = Cuts.of(rows["document"], rows["start"], rows["end"], self.fills[rows["rule"]])
            sizes = corpus.columns["bytes"][first:end]
            made.append(cut_whole(cuts, np.arange(first, end), sizes, self.min_left_bytes))
        return made

    def figures(self, corpus: Corpus, cuts: Sequence[Cuts], state: Path) -> dict[str, Any]:
        rows = [np.load(state / f"spans-{number:05d}.npy") for number, *_ in corpus.spans()]
        seen = sum(int(np.load(state / f"seen-{number:05d}.npy")[0]) for number, *_ in corpus.spans())
        whole = np.concatenate([np.empty(0, _SPAN), *rows])
        rules = {}
        for place, name in enumerate(self.rule_names):
            mine = whole[whole["rule"] == place]
            rules[name] = {"spans": len(mine), "documents": len(np.unique(mine["document"]))}
        return {**figures(cuts), self.unit: seen, "rules": rules}
