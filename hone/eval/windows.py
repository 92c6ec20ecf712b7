"""Windows of a text for scoring: where each begins, and which of its predictions are scored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

LOGITS = 1 << 22
"""Logits in memory at once for one model (16 MiB in float32), so that long texts and large vocabularies need no more."""

Join = Literal["documents", "stream"]
"""documents: windows start anew in each document. stream: all documents concatenated, as in published perplexities."""


class ScoredWindow(NamedTuple):
    """Input tokens `start` to `stop` (exclusive); the predictions of tokens `first` to `stop` (inclusive) are scored."""

    start: int
    stop: int
    first: int


def cut(starts: np.ndarray, window: int, stride: int | None = None, join: Join = "documents") -> list[ScoredWindow]:
    """Windows over documents that begin at `starts` (int64 [num_documents + 1], the last is the end).

    Each window has at most `window` input tokens and begins `stride` (default: `window`) tokens after the one before.
    A token is scored once, in the first window that predicts it; only the first token of each document (of the
    whole text for `stream`) is not predicted. With a stride below the window, every token except those of a document's
    first window has at least window - stride tokens of context.
    """
    stride = stride or window
    assert 0 < stride <= window, f"stride {stride} must lie in 1 to window {window}"
    borders = [int(starts[0]), int(starts[-1])] if join == "stream" else [int(start) for start in starts]
    windows = []
    for begin, end in itertools.pairwise(borders):
        first = begin + 1
        for start in range(begin, end - 1, stride):
            stop = min(start + window, end - 1)
            windows.append(ScoredWindow(start, stop, first))
            first = stop + 1
            if stop == end - 1:
                break
    return windows


def batches(windows: list[ScoredWindow], batch_tokens: int) -> Iterator[list[ScoredWindow]]:
    """Batches of windows of similar length, longest first, at most `batch_tokens` padded positions (but at least one window)."""
    group: list[ScoredWindow] = []
    for one in sorted(windows, key=lambda one: (one.start - one.stop, one.start)):
        longest = group[0].stop - group[0].start if group else 0
        if group and longest * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(one)
    if group:
        yield group
