"""Features of a text in hashed buckets: n-grams of words and of letters, counted by a kernel on UTF-8 bytes.

A word is a match of `\\w+`, in lower case letter by letter; a letter of a script without spaces (Han, Kana) is a word of
its own. In n-grams of letters, everything between two words is one space. A text's vector is (1 + ln count) x idf in each bucket,
scaled to length 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hone.text.compiled import entry, kernel
from hone.text.hashing import BASIS, PRIME, ROLL, code_point, mix, roll_power

_LETTERS = np.uint64(0xD6E8FEB86659FD93)  # separates n-grams of letters from those of words
_TWO, _THREE = np.uint64(0xA5A3564A00000000), np.uint64(0xC2B2AE3D27D4EB4F)
_LOGS = 1 + np.log(np.maximum(np.arange(1024), 1.0))


class Scratch(NamedTuple):
    """The counts of one text by bucket, in buffers that are reused for the next."""

    shift: np.uint64  # right shift of a hash to its bucket
    marks: np.ndarray  # int64 [buckets]: the `turn` of a count
    counts: np.ndarray  # int32 [buckets]
    touched: np.ndarray  # int64 [buckets], of which the first are the text's buckets


@entry
def _scratch(log_buckets):
    size = 1 << log_buckets
    marks, counts, touched = np.zeros(size, np.int64), np.zeros(size, np.int32), np.empty(size, np.int64)
    return Scratch(np.uint64(64 - log_buckets), marks, counts, touched)


@kernel
def _count(hashed, shift, turn, marks, counts, touched, num):
    """Counts one occurrence; `num` buckets were touched before, returns the new number."""
    bucket = np.int64(hashed >> shift)
    if marks[bucket] == turn:
        counts[bucket] += 1
        return num
    marks[bucket] = turn
    counts[bucket] = 1
    touched[num] = bucket
    return num + 1


@entry
def collect(data, start, end, table, word_runs, letter_run, turn, scratch):
    """Counts the features of data[start:end] and lists their buckets in `touched`; returns the number of buckets.

    `turn` is different for each text.
    """
    shift, marks, counts, touched = scratch
    num = 0
    word = BASIS
    inside = False
    before = before_that = np.uint64(0)
    num_words = 0
    ring = np.zeros(max(letter_run, 1), np.uint64)
    power = roll_power(max(letter_run, 1))
    rolled = np.uint64(0)
    num_letters = slot = 0
    spaced = True
    place = start
    while place <= end:
        # A space after the end closes the last word.
        step = np.int64(1)
        point = np.int64(32)
        if place < end:
            point = np.int64(data[place])
            if point >= 128:
                point, step = code_point(data, place, end)
        letter = table[point] if point < len(table) else np.uint32(point)
        place += step
        alone = letter >= 0x2E80 and (letter < 0xA000 or letter >= 0x20000)
        if inside and (letter == 0 or alone):
            closing = True
        else:
            closing = False
        for emit in range(2):  # the previous word, then a letter that is a word of its own
            if emit == 0:
                if not closing:
                    continue
                inside = False
            else:
                if not alone:
                    continue
                word = (BASIS ^ np.uint64(letter)) * PRIME
            now = mix(word)
            word = BASIS
            num_words += 1
            num = _count(now, shift, turn, marks, counts, touched, num)
            if word_runs > 1 and num_words > 1:
                num = _count(mix(before * ROLL + now + _TWO), shift, turn, marks, counts, touched, num)
                if word_runs > 2 and num_words > 2:
                    three = mix((before_that * ROLL + before) * ROLL + now + _THREE)
                    num = _count(three, shift, turn, marks, counts, touched, num)
            before_that = before
            before = now
        if letter != 0 and not alone:
            word = (word ^ np.uint64(letter)) * PRIME
            inside = True
        if letter_run > 0:
            if letter == 0:
                if spaced:
                    continue
                spaced = True
                letter = np.uint32(32)
            else:
                spaced = False
            rolled = rolled * ROLL + np.uint64(letter) - ring[slot] * power
            ring[slot] = np.uint64(letter)
            slot = slot + 1 if slot + 1 < letter_run else 0
            num_letters += 1
            if num_letters >= letter_run:
                num = _count(mix(rolled ^ _LETTERS), shift, turn, marks, counts, touched, num)
    return num


@kernel
def _gain(count):
    return _LOGS[count] if count < len(_LOGS) else 1 + np.log(np.float64(count))


@entry
def frequencies(data, offsets, table, word_runs, letter_run, log_buckets):
    """The number of texts in which each bucket occurs; int64 [2^log_buckets]."""
    size = 1 << log_buckets
    scratch = _scratch(log_buckets)
    touched = scratch[3]
    found = np.zeros(size, np.int64)
    for text in range(len(offsets) - 1):
        num = collect(data, offsets[text], offsets[text + 1], table, word_runs, letter_run, text + 1, scratch)
        for index in range(num):
            found[touched[index]] += 1
    return found


@entry
def margins(data, offsets, table, word_runs, letter_run, log_buckets, weights, idf, bias):
    """weights . vector + bias of each text; float64 [n]. The bias alone for a text without a word."""
    scratch = _scratch(log_buckets)
    _, _, counts, touched = scratch
    result = np.empty(len(offsets) - 1)
    for text in range(len(offsets) - 1):
        num = collect(data, offsets[text], offsets[text + 1], table, word_runs, letter_run, text + 1, scratch)
        total = square = 0.0
        for index in range(num):
            bucket = touched[index]
            value = _gain(counts[bucket]) * np.float64(idf[bucket])
            total += value * np.float64(weights[bucket])
            square += value * value
        result[text] = bias + (total / np.sqrt(square) if num else 0.0)
    return result


@entry
def epoch(
    data,
    offsets,
    table,
    word_runs,
    letter_run,
    log_buckets,
    idf,
    targets,
    shares,
    order,
    rate,
    shrink,
    weights,
    squares,
):
    """One epoch of AdaGrad (Duchi et al. 2011) over the texts in `order`; changes `weights` and `squares` (float64 [buckets + 1],
    the bias last).

    The loss of a text is that of logistic regression times its share, plus shrink / 2 times the squares of its weights;
    `targets` are 0 or 1. Returns the mean loss over the epoch.
    """
    size = 1 << log_buckets
    scratch = _scratch(log_buckets)
    _, _, counts, touched = scratch
    loss = 0.0
    for turn in range(len(order)):
        text = order[turn]
        num = collect(data, offsets[text], offsets[text + 1], table, word_runs, letter_run, turn + 1, scratch)
        total = square = 0.0
        for index in range(num):
            bucket = touched[index]
            value = _gain(counts[bucket]) * idf[bucket]
            total += value * weights[bucket]
            square += value * value
        scale = 1 / np.sqrt(square) if num else 0.0
        margin = weights[size] + total * scale
        signed = margin if targets[text] > 0.5 else -margin
        loss += shares[text] * (np.log1p(np.exp(-signed)) if signed > -30 else -signed)
        grad = shares[text] * (1 / (1 + np.exp(-margin)) - targets[text])
        squares[size] += grad * grad
        weights[size] -= rate * grad / (np.sqrt(squares[size]) + 1e-12)
        for index in range(num):
            bucket = touched[index]
            change = grad * _gain(counts[bucket]) * idf[bucket] * scale + shrink * weights[bucket]
            squares[bucket] += change * change
            weights[bucket] -= rate * change / (np.sqrt(squares[bucket]) + 1e-12)
    return loss / max(len(order), 1)
