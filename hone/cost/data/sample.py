"""Cost of curating text: what a sample kept, took and wrote, scaled to the whole input; memory of the calling process, bytes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hone.base.figure import Estimate, human_bytes
from hone.base.plan import MEMORY

BATCH_COPIES = 9
"""Copies of an annotated batch of text: text, offsets, words, columns, Arrow's copies and compressed output."""
DOCUMENT_BYTES = 60
"""Columns and keys a document in the calling process: the slope of its peak over runs of 0.1, 1 and 10 GB (docs/scale.md)."""
WORD_BYTES = 800
"""Bytes per distinct word while BPE is trained: 720 to 970 B at 1 to 16 MB of text in 76 languages."""
TRAIN_POWER = 0.85
"""Training BPE counts words (linear) and merges distinct ones (a power of the text): this fits 1 to 12 MB of code and prose."""
TOKEN_BYTES = 40
"""An entry of a tokenizer in its file."""
MARGIN_BYTES = 1 << 16
"""Statistics, samples and settings in the finished folder."""


class Pace(NamedTuple):
    """Seconds of a run: `shared` by workers, `single` in the calling process, `started` to start workers; `each`: the rates' formula."""

    shared: float
    single: float
    started: float
    each: str
    bound: bool = False

    def estimate(self, workers: int) -> Estimate:
        """The time with `workers` workers that share the work evenly."""
        value = self.shared / workers + self.single + (self.started if workers > 1 else 0.0)
        formula = f"{self.each}; {self.shared:.1f} s of it shared by {workers} worker{'s' * (workers > 1)}"
        formula += f" + {self.started:.1f} s to start them" if workers > 1 else ""
        return Estimate(value=value, unit="s", formula=formula, bound=self.bound)


@dataclass
class Trial:
    """What the steps of the data stage made of a sample. Arrays have an entry per document: the part of the sample that it is of, how many
    documents of the input it stands for, its bytes, and those left after all steps, 0 for a dropped one. `seconds` of the steps, `written`
    bytes of the tables. Of `token_bytes` of text that were tokenized, `rate` is the bytes of a token, `words` the number of distinct
    words, of which twice the text has `growth` times as many (Heaps 1978).
    """

    part: np.ndarray
    weight: np.ndarray
    size: np.ndarray
    left: np.ndarray
    seconds: dict[str, float]
    written: int = 0
    token_bytes: float = 1.0
    rate: float = 1.0
    words: int = 0
    growth: float = 1.0
    vocab_size: int = 0
    eos_token_id: int | None = None

    @property
    def kept(self) -> float:
        """Bytes of the input's text that are left after all steps."""
        return float(self.weight @ self.left)

    @property
    def documents(self) -> float:
        """Documents of the input that are kept."""
        return float(self.weight @ (self.left > 0))

    @property
    def tokens(self) -> float:
        """Tokens of the kept documents, with one at the end of each."""
        return self.kept / self.rate + self.documents

    def error(self, stands_for: np.ndarray) -> float:
        """Relative standard error of the kept bytes: how the parts, which stand for so many bytes of input each, differ in what is left."""
        count = len(stands_for)
        left = np.bincount(self.part, self.weight * self.left, count)
        if count < 2 or not left.sum():
            return 1.0
        apart = left - stands_for * left.sum() / stands_for.sum()
        return float((count / (count - 1) * (apart**2).sum()) ** 0.5 / left.sum())

    def estimates(
        self,
        sample: str,
        *,
        stands_for: np.ndarray | None,
        missing: Sequence[str],
        train_share: float,
        max_train_bytes: int,
        batch_bytes: int,
        held_bytes: float,
        started_s: float,
    ) -> tuple[dict[str, Estimate], Pace]:
        """The estimates of the whole input, and the parts of its time.

        `sample` says what was sampled, `stands_for` [parts] the bytes of input of each part, None for all of the input. `missing` are the
        reasons for which the estimates are bounds. `max_train_bytes` of text train a tokenizer, 0: one is given. `held_bytes` of
        embeddings are held; other memory is a batch's, the words' and the documents'.
        """
        text, kept = float(self.weight @ self.size), self.kept
        grown = text / self.size.sum()
        trained = min(kept * train_share, max_train_bytes) / self.token_bytes
        error = 0.0 if stands_for is None else self.error(stands_for)
        said = "; ".join([sample, *missing])

        def estimate(value: float, unit: str, formula: str, error: float) -> Estimate:
            tolerance = None if missing or (self.left > 0).sum() < 10 else max(3 * error, 0.01)
            formula = f"{formula}; {said}; standard error {100 * error:.1f} %"
            return Estimate(value=value, unit=unit, formula=formula, bound=bool(missing), tolerance=tolerance)

        seconds = {name: self.seconds[name] * grown for name in ("read", "filter to write")}
        seconds["tokenize"] = self.seconds["tokenize"] * kept / self.token_bytes
        train_s = self.seconds["train"] * (2 * trained) ** TRAIN_POWER
        rates = f"{', '.join(f'{name} {one:.2f}' for name, one in seconds.items())}, training BPE {train_s:.2f}"
        partial = any("without" in one for one in missing)
        pace = Pace(sum(seconds.values()), train_s, started_s, f"{said}; seconds at its rates: {rates}", partial)
        words = self.words * max(trained, 1.0) ** float(np.log2(self.growth)) if trained else 0.0
        made = {
            "time_s": pace.estimate(1),
            MEMORY: data_memory(min(text, batch_bytes), float(self.weight.sum()), words, held_bytes),
            "disk_bytes": data_disk(grown * self.written, self.tokens, self.vocab_size),
            "kept_bytes": estimate(kept, "B", f"text bytes x share kept ({kept / max(text, 1):.3f})", error),
        }
        if self.vocab_size:
            # Documents are held out by hash, so the text left to train on varies; so do the bytes of a token, by a percent or so.
            drawn = (1 - train_share) / train_share * float(self.weight @ self.left**2) / max(kept, 1) ** 2
            formula = f"(kept bytes / {self.rate:.2f} bytes a token + an end a document) x train share"
            error = (error**2 + drawn + 0.01**2) ** 0.5
            made["train_tokens"] = estimate(train_share * self.tokens, "tokens", formula, error)
        return made, pace


def data_memory(batch_bytes: float, documents: float, words: float, held: float) -> Estimate:
    """Memory growth of the calling process: a batch's copies or the `words` (distinct ones) that BPE is trained on, some bytes per document,
    and `held` bytes of embeddings."""
    batch = BATCH_COPIES * batch_bytes
    more = f" + {held:.3g} B of embeddings, held twice" if held else ""
    return Estimate(
        value=max(batch, words * WORD_BYTES) + documents * DOCUMENT_BYTES + held,
        unit="B",
        formula=f"the larger of {BATCH_COPIES} copies of a batch ({human_bytes(batch)}) and {WORD_BYTES} B x {words:.0f} distinct "
        f"words to train on, + {DOCUMENT_BYTES} B x {documents:.0f} documents{more}",
    )


def data_disk(tables: float, tokens: float, vocab_size: int) -> Estimate:
    """Bytes of the finished folder: `tables` of documents and columns, tokens, the tokenizer, and a margin."""
    width = 2 if vocab_size <= 1 << 16 else 4
    return Estimate(
        value=tables + tokens * width + vocab_size * TOKEN_BYTES + MARGIN_BYTES,
        unit="B",
        formula=f"{human_bytes(tables)} of tables + {tokens:.0f} tokens x {width} B + {vocab_size} tokenizer entries x {TOKEN_BYTES} B "
        f"+ {human_bytes(MARGIN_BYTES)} of files beside them",
    )
