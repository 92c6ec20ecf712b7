"""Best fit: packs whole documents into sequences of a given length, each into the one with the least sufficient space.

Best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): documents from the longest to the shortest, each into the open
sequence with the least space that still holds it. A document of n tokens takes n - 1 input positions, since its last token
is a target only. A longer document is cut: its full sequences are complete and the rest is packed like a document.
"""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry


def best_fit(starts: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(firsts, pieces) of a PackingIndex: sequences of `seq_len` input positions for documents that begin at `starts` (int64 [num_documents + 1]).

    Every token that has a next one in its document is an input exactly once. Sequences are in the order of their first
    document, pieces within a sequence too: a pure function of its arguments.
    """
    predictions = np.maximum(np.diff(starts) - 1, 0)
    rests = predictions % seq_len
    order = _longest_first(rests, seq_len)
    rows_of, num_sequences = _place(rests[order], seq_len)
    row_of = np.full(len(rests), -1, np.int64)
    row_of[order] = rows_of
    num_pieces = int((-(-predictions // seq_len)).sum())
    return _lay_out(starts.astype(np.int64), predictions, row_of, num_sequences, num_pieces, seq_len)


def num_sequences(starts: np.ndarray, seq_len: int) -> int:
    """The number of sequences that `best_fit` makes, without computing them."""
    predictions = np.maximum(np.diff(starts) - 1, 0)
    rests = (predictions % seq_len).astype(np.int32)
    num_full = int((predictions // seq_len).sum())
    del predictions
    return num_full + _place(rests[_longest_first(rests, seq_len)], seq_len)[1]


@entry
def _longest_first(sizes, capacity):
    """Indices of `sizes` (0 to capacity - 1) from the largest to the smallest, equal ones in order, without zeros."""
    places = np.zeros(capacity + 1, np.int64)
    for size in sizes:
        if size > 0:
            places[size - 1] += 1
    behind = 0
    for size in range(capacity - 1, -1, -1):  # places[size - 1] becomes the first index for `size`
        count = places[size]
        places[size] = behind
        behind += count
    order = np.empty(behind, np.int64)
    for index in range(len(sizes)):
        size = sizes[index]
        if size > 0:
            order[places[size - 1]] = index
            places[size - 1] += 1
    return order


@entry
def _place(sizes, capacity):
    """Best fit for `sizes` (int64, descending, 1 to capacity) in this order: (sequence of each, number of sequences).

    A tree over the spaces 0 to capacity has a mark at each node below which a sequence with such space is open, so that the
    least sufficient space is found in steps of its depth. Of sequences with equal space the last changed is taken.
    """
    width = 1
    while width <= capacity:
        width *= 2
    tree = np.zeros(2 * width, np.uint8)
    head = np.full(capacity + 1, -1, np.int64)
    below = np.full(len(sizes), -1, np.int64)  # the next sequence with the same space
    rows = np.empty(len(sizes), np.int64)
    num_sequences = 0
    for item in range(len(sizes)):
        size = sizes[item]
        node = width + size
        if tree[node] == 0:
            while node > 1 and (node & 1 == 1 or tree[node + 1] == 0):
                node >>= 1
            if node > 1:
                node += 1
                while node < width:
                    node *= 2
                    if tree[node] == 0:
                        node += 1
        if node > 1:
            room = node - width
            row = head[room]
            head[room] = below[row]
            if head[room] == -1:
                tree[node] = 0
                node >>= 1
                while node >= 1 and tree[2 * node] == 0 and tree[2 * node + 1] == 0:
                    tree[node] = 0
                    node >>= 1
        else:
            room = capacity
            row = num_sequences
            num_sequences += 1
        rows[item] = row
        room -= size
        if room > 0:
            below[row] = head[room]
            head[room] = row
            node = width + room
            while node >= 1 and tree[node] == 0:
                tree[node] = 1
                node >>= 1
    return rows, num_sequences


@entry
def _lay_out(starts, predictions, row_of, num_shared, num_pieces, seq_len):
    """(firsts, pieces) from the sequence of each document's rest, -1 without one; sequences are numbered by their first piece."""
    number_of = np.full(num_shared, -1, np.int64)
    owners = np.empty(num_pieces, np.int64)
    found = np.empty((num_pieces, 2), np.int64)
    piece = 0
    num_sequences = 0
    for document in range(len(predictions)):
        start = starts[document]
        left = predictions[document]
        while left > 0:
            size = min(left, seq_len)
            if size == seq_len:
                owners[piece] = num_sequences
                num_sequences += 1
            else:
                shared = row_of[document]
                if number_of[shared] == -1:
                    number_of[shared] = num_sequences
                    num_sequences += 1
                owners[piece] = number_of[shared]
            found[piece, 0] = start
            found[piece, 1] = size
            piece += 1
            start += size
            left -= size
    firsts = np.zeros(num_sequences + 1, np.int64)
    for owner in owners:
        firsts[owner + 1] += 1
    firsts = np.cumsum(firsts)
    places = firsts[:-1].copy()
    pieces = np.empty((num_pieces, 2), np.int64)
    for index in range(num_pieces):
        place = places[owners[index]]
        places[owners[index]] += 1
        pieces[place, 0] = found[index, 0]
        pieces[place, 1] = found[index, 1]
    return firsts, pieces
