"""Cost of curating text, in closed form: seconds from the rates of a sample, memory of the calling process, bytes on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hone.base.figure import Estimate, human_bytes

BATCH_COPIES = 9
"""Copies of an annotated batch of text: text, offsets, words, columns, Arrow's copies and compressed output."""
DOCUMENT_BYTES = 60
"""Columns and keys a document in the calling process: the slope of its peak over runs of 0.1, 1 and 10 GB (docs/scale.md)."""
WORD_BYTES = 800
"""Bytes per distinct word while BPE is trained: 720 to 970 B at 1 to 16 MB of text in 76 languages."""
TRAIN_POWER = 0.85
"""Training BPE counts words (linear) and merges distinct ones (a power of the text): this fits 1 to 12 MB of code and prose."""


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


def data_memory(*, batch_bytes: float, documents: float, words: float, shared: bool) -> Estimate:
    """Memory growth of the calling process: a batch's copies or the words that BPE is trained on, and some bytes per document.

    `words` are the distinct ones; 0 where no tokenizer is trained. `shared`: workers annotate, in their own memory.
    """
    batch = 0.0 if shared else BATCH_COPIES * batch_bytes
    value = max(batch, words * WORD_BYTES) + documents * DOCUMENT_BYTES
    return Estimate(
        value=value,
        unit="B",
        formula=f"the larger of {BATCH_COPIES} copies of a batch ({human_bytes(batch)}) and {WORD_BYTES} B x {words:.0f} distinct "
        f"words to train on, + {DOCUMENT_BYTES} B x {documents:.0f} documents",
    )


def data_disk(rates: Mapping[str, tuple[float, float]]) -> Estimate:
    """Bytes of the finished folder. `rates` by kind of file: (how many, bytes of each)."""
    return Estimate(
        value=sum(count * each for count, each in rates.values()),
        unit="B",
        formula=" + ".join(f"{count:.0f} {name} x {each:.3g} B" for name, (count, each) in rates.items()),
    )
