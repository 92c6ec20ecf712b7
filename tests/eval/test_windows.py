"""Every token but the first of a document is scored exactly once, with the context that the stride promises."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hone.eval.windows import batches, cut


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    window=st.integers(1, 12),
    overlap=st.integers(0, 11),
    join=st.sampled_from(["documents", "stream"]),
)
def test_each_prediction_once(sizes, window, overlap, join):
    stride = max(window - overlap, 1)
    starts = np.cumsum([0, *sizes])
    counts = np.zeros(int(starts[-1]), int)
    context = np.zeros(int(starts[-1]), int)
    borders = [0, int(starts[-1])] if join == "stream" else starts.tolist()
    begins = np.searchsorted(borders, np.arange(int(starts[-1])), side="right")
    for piece in cut(starts, window, stride, join):
        assert 0 < piece.stop - piece.start <= window
        assert begins[piece.start] == begins[piece.stop]  # never looks over a document's border
        for token in range(piece.first, piece.stop + 1):
            counts[token] += 1
            context[token] = token - piece.start
    firsts = {begin for begin, end in itertools.pairwise(borders) if end > begin}
    assert counts.tolist() == [0 if token in firsts else 1 for token in range(len(counts))]
    for token in range(len(counts)):
        since = token - borders[int(begins[token]) - 1]
        assert context[token] >= min(since, window - stride + 1)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    batch_tokens=st.integers(1, 100),
)
def test_batches_hold_every_piece_and_their_size(lengths, batch_tokens):
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    pieces = cut(starts, 64)
    groups = list(batches(pieces, batch_tokens))
    assert sorted(piece for group in groups for piece in group) == sorted(pieces)
    for group in groups:
        longest = max(piece.stop - piece.start for piece in group)
        assert len(group) == 1 or longest * len(group) <= batch_tokens
