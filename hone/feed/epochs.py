"""Epochs of packed tokens: the steps that read so many, and what is said of data that steps read again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.base.errors import SpecError
from hone.feed.facts import DataFacts

if TYPE_CHECKING:
    from hone.feed.load import Packing

MANY_EPOCHS = 4
"""Up to so many epochs repeated text trains about as well as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""


def epoch_of(data: Sequence[DataFacts], seq_len: int) -> Packing:
    """One pass over the train splits of `data`: the sums of their packings."""
    from hone.feed.load import Packing

    return Packing(*map(sum, zip(*(one.packed("train", seq_len) for one in data), strict=True)))


def steps_for(epoch: Packing, batch_size: int, tokens: int | None) -> int:
    """The steps that read `tokens` tokens, padding not counted, to within one sequence; None: every sequence once."""
    if tokens is None or not epoch.tokens:
        return max(1, math.ceil(epoch.num_sequences / batch_size))
    sequences = tokens * epoch.num_sequences / epoch.tokens
    return max(1, math.floor((sequences - 1) / batch_size) + 1)


def check_batch(epoch: Packing, batch_size: int, seq_len: int, where: str) -> None:
    """Raises SpecError when a batch would hold every sequence of the data at least twice."""
    if not epoch.num_sequences or batch_size < 2 * epoch.num_sequences:
        return
    raise SpecError(
        f"a step takes batch_size {batch_size} sequences of seq_len {seq_len}, but {where} has {_said(epoch)}: "
        f"each would be {batch_size / epoch.num_sequences:.3g} times in every batch, at that cost and without any use",
        fix=f"set batch_size to at most {epoch.num_sequences}, lower seq_len, or give more text",
    )


def repeats(epoch: Packing, batch_size: int, steps: int) -> tuple[str, ...]:
    """Lines on sequences that are read more than once in a batch, or in very many epochs."""
    count = epoch.num_sequences
    if not count:
        return ()
    found, epochs = [], steps * batch_size / count
    if batch_size > count:
        times = "some of them twice" if batch_size < 2 * count else f"each about {batch_size / count:.3g} times"
        found.append(f"note: the data have {_said(epoch)}, fewer than batch_size {batch_size}: every batch has {times}")
    if epochs > MANY_EPOCHS:
        found.append(
            f"note: the data are read {epochs:.4g} times by {steps} steps x batch_size {batch_size}, because they have {_said(epoch)}; "
            f"beyond {MANY_EPOCHS} epochs more of them teach less and less (arXiv:2305.16264)"
        )
    return tuple(found)


def _said(epoch: Packing) -> str:
    sequences = "1 sequence" if epoch.num_sequences == 1 else f"{epoch.num_sequences} sequences"
    return f"{sequences} of {epoch.tokens} tokens in all"
