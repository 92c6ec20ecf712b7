"""Kernels of language identification: letters, n-grams, their sums per language, and the result.

A text is read as runs of lower-cased letters of one script; everything between two runs counts as one space. The script
with the most bytes of letters is the text's, and only languages written in it are scored: with rows of the table for
the script, a lane for each of its languages and one for the background, a mixture of all its languages and noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hone.text.batch import Texts
from hone.text.compiled import allocating, entry, kernel
from hone.text.langid.alphabet import HAN, MARK, NUM_CHARACTERS, OTHER, SCRIPT_SHIFT

WHOLE_BYTES = 4096
"""A text of at most so many bytes is read whole."""
NUM_WINDOWS, WINDOW_BYTES = 8, 512
"""Of a longer text, this many evenly spaced windows of this many bytes are read."""
BUCKET_BITS = 14
SIZES = (1, 2, 3, 4)
"""Letters of an n-gram, with spaces. Single letters only in Han: in other scripts they carry little information and a third of the cost."""
STEPS = 16
"""Table entries are log likelihood ratios to noise (uniform over buckets) in steps of 1 / STEPS nats."""
BIAS = 128
WIDE = 32
_MAX_LANES = 256
_LOWER = (1 << SCRIPT_SHIFT) - 1


def frozen(texts: Texts) -> Texts:
    """Read-only views of `texts`, the one array type that the kernels are compiled for."""
    data, offsets = texts.data.view(), texts.offsets.view()
    data.flags.writeable = offsets.flags.writeable = False
    return Texts(data, offsets)


class Tables(NamedTuple):
    """A model as arrays for the kernels. S scripts, at most M lanes per script."""

    letters: np.ndarray  # int32 [NUM_CHARACTERS]: the alphabet
    rows: np.ndarray  # uint8, flat, entries + BIAS: rows of all scripts, each script's [2^BUCKET_BITS, stride]
    words: np.ndarray  # uint64: the same, little-endian, eight entries a word
    base: np.ndarray  # int64 [S]: where a script's rows begin; -1 for a script without languages
    stride: np.ndarray  # int64 [S]: lanes of a row, from WIDE on a multiple of WIDE
    count: np.ndarray  # int64 [S]: languages of the script; the lane after them is the background
    fit: np.ndarray  # float64 [S, M, 2]: mean and standard deviation of the fit of a language's own texts
    allowed: np.ndarray  # bool [S, M]: candidates
    group: np.ndarray  # int64 [S, M]: lanes with one number are one answer, whose probability is the sum of theirs
    limits: np.ndarray  # float64 [6]: temperature, its exponent, and the four bounds of `_answer`


class Scratch(NamedTuple):
    """Buffers for the current text."""

    codes: np.ndarray  # int32: its letters, 0 between runs
    buckets: np.ndarray  # int32: its n-grams
    sums: np.ndarray  # int32 [lanes]: the sum of their rows
    votes: np.ndarray  # int64 [scripts]: bytes of its letters in each script
    seen: np.ndarray  # int64 [2]: letters, visible characters


@allocating
def _scratch():
    codes = np.empty(2 * WHOLE_BYTES + 16, np.int32)
    buckets = np.empty(len(SIZES) * len(codes), np.int32)
    sums = np.zeros(_MAX_LANES, np.int32)
    return Scratch(codes, buckets, sums, np.zeros(MARK + 1, np.int64), np.zeros(2, np.int64))


@kernel
def _fold(data, start, end, letters, codes, n, votes, seen):
    """Appends the letters of data[start:end] to codes[n:], 0 between runs; returns the new n.

    Adds the bytes of letters to votes [per script], letters and visible characters to seen [2]. Invalid UTF-8 is no letter.
    """
    last = 0
    i = start
    while i < end:
        byte = np.int32(data[i])
        size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        point = np.int32(NUM_CHARACTERS)
        if byte < 0x80:
            point = byte
        elif i + size <= end and byte >= 0xC0:
            point = byte & (0x7F >> size)
            for k in range(1, size):
                point = (point << 6) | (np.int32(data[i + k]) & 0x3F)
        i += size
        entry = letters[point] if 0 <= point < NUM_CHARACTERS else np.int32(0)
        if entry == 0:
            if last != 0:
                codes[n] = 0
                n += 1
                last = 0
            if point > 32:
                seen[1] += 1
            continue
        script = entry >> SCRIPT_SHIFT
        seen[0] += 1
        seen[1] += 1
        if script == MARK:
            if last == 0:
                continue
            script = last
        else:
            votes[script] += size
        if script != last and last != 0:
            codes[n] = 0
            n += 1
        last = script
        codes[n] = np.int32(script << SCRIPT_SHIFT) | (entry & _LOWER)
        n += 1
    if last != 0:
        codes[n] = 0
        n += 1
    return n


@kernel
def _read(data, start, end, letters, scratch):
    """Writes the letters of one text, whole or by windows, to the codes; returns their number including spaces."""
    codes, votes, seen = scratch.codes, scratch.votes, scratch.seen
    votes[:] = 0
    seen[:] = 0
    codes[0] = 0
    if end - start <= WHOLE_BYTES:
        return _fold(data, start, end, letters, codes, np.int64(1), votes, seen)
    n = np.int64(1)
    gap = (end - start - WINDOW_BYTES) // (NUM_WINDOWS - 1)
    for k in range(NUM_WINDOWS):
        first = start + k * gap
        last = first + WINDOW_BYTES
        while first < last and data[first] & 0xC0 == 0x80:
            first += 1
        while last > first and last < end and data[last] & 0xC0 == 0x80:
            last -= 1
        n = _fold(data, first, last, letters, codes, n, votes, seen)
    return n


@kernel
def _script(votes):
    """The script with the most bytes, the lowest number of equal ones; 0 without letters."""
    best = 0
    for script in range(1, OTHER + 1):
        if votes[script] > votes[best]:
            best = script
    return best


@kernel
def _mix(x, code):
    x = (x ^ (x >> np.uint64(29))) + code
    return x * np.uint64(0xBF58476D1CE4E5B9)


@kernel
def _grams(codes, n, script, buckets):
    """Buckets of the n-grams that end at each letter of `script` and at each space; returns their number."""
    shift = np.uint64(64 - BUCKET_BITS)
    one = np.uint64(1)
    none = np.uint64(0)
    a = b = c = d = none
    k = 0
    for i in range(n):
        code = codes[i]
        if code >> SCRIPT_SHIFT != script:
            code = np.int32(0)
        if code == 0 and a == one:
            continue
        d = c
        c = b
        b = a
        a = np.uint64(code & _LOWER) + one
        x = a * np.uint64(0x9E3779B97F4A7C15)
        if script == HAN and code != 0:
            buckets[k] = np.int32(x >> shift)
            k += 1
        if b == none:
            continue
        x = _mix(x, b)
        buckets[k] = np.int32(x >> shift)
        k += 1
        if c == none:
            continue
        x = _mix(x, c)
        buckets[k] = np.int32(x >> shift)
        k += 1
        if d == none:
            continue
        x = _mix(x, d)
        buckets[k] = np.int32(x >> shift)
        k += 1
    return k


@kernel
def _add_words(buckets, first, last, words, base, stride, sums):
    """Adds the rows of buckets[first:last], at most 256 of them, to sums: eight lanes per word, 32 at a time.

    A word's even and odd bytes are summed separately, as four 16-bit sums each, which 256 bytes cannot overflow.
    """
    even = np.uint64(0x00FF00FF00FF00FF)
    byte = np.uint64(8)
    for word in range(0, stride, 4):
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.uint64(0)
        for i in range(first, last):
            row = base + np.int64(buckets[i]) * stride + word
            x0 = words[row]
            x1 = words[row + 1]
            x2 = words[row + 2]
            x3 = words[row + 3]
            a0 += x0 & even
            a1 += x1 & even
            a2 += x2 & even
            a3 += x3 & even
            b0 += (x0 >> byte) & even
            b1 += (x1 >> byte) & even
            b2 += (x2 >> byte) & even
            b3 += (x3 >> byte) & even
        for part in range(4):
            shift = np.uint64(16 * part)
            low = np.uint64(0xFFFF)
            lane = 8 * word + 2 * part
            sums[lane] += np.int32((a0 >> shift) & low)
            sums[lane + 1] += np.int32((b0 >> shift) & low)
            sums[lane + 8] += np.int32((a1 >> shift) & low)
            sums[lane + 9] += np.int32((b1 >> shift) & low)
            sums[lane + 16] += np.int32((a2 >> shift) & low)
            sums[lane + 17] += np.int32((b2 >> shift) & low)
            sums[lane + 24] += np.int32((a3 >> shift) & low)
            sums[lane + 25] += np.int32((b3 >> shift) & low)


@kernel
def _add(buckets, k, rows, words, base, stride, sums):
    """sums[lane] = the sum of the rows of `buckets`, in units of 1 / STEPS nats."""
    sums[:stride] = -BIAS * k
    if stride >= WIDE:
        for first in range(0, k, 256):
            _add_words(buckets, first, min(k, first + 256), words, base // 8, stride // 8, sums)
    else:
        for i in range(k):
            row = base + np.int64(buckets[i]) * stride
            for lane in range(stride):
                sums[lane] += rows[row + lane]


@kernel
def _sum(data, start, end, tables, scratch):
    """(script, n-grams) of one text, whose rows are summed in the sums; 0 n-grams where no language has its script."""
    length = _read(data, start, end, tables.letters, scratch)
    script = _script(scratch.votes)
    if tables.base[script] < 0:
        return script, 0
    k = _grams(scratch.codes, length, script, scratch.buckets)
    _add(scratch.buckets, k, tables.rows, tables.words, tables.base[script], tables.stride[script], scratch.sums)
    return script, k


@kernel
def _answer(sums, k, script, votes, seen, tables):
    """(lane, probability) of the text's language, (-1, 0.0) for unknown."""
    temperature, exponent, deviations, standard, least_share, least_score = tables.limits
    total = 0
    for number in range(1, OTHER + 1):
        total += votes[number]
    if seen[0] < least_share * seen[1] or 2 * votes[script] < total:
        return -1, 0.0
    best = -1
    count = tables.count[script]
    for lane in range(count):
        if best < 0 or sums[lane] > sums[best]:
            best = lane
    # The likeliest of all languages must be a candidate: among few candidates a neighbour of theirs would look certain.
    if best < 0 or not tables.allowed[script, best]:
        return -1, 0.0
    fit = (sums[best] - sums[count]) / (STEPS * k)
    slack = deviations * tables.fit[script, best, 1] * max(1.0, np.sqrt(standard / k))
    if fit < tables.fit[script, best, 0] - slack:
        return -1, 0.0
    heat = STEPS * temperature * k**exponent
    own = whole = 0.0
    for lane in range(count):
        gap = (sums[lane] - sums[best]) / heat
        if gap > -30.0:  # less is below the last digit
            share = np.exp(gap)
            whole += share
            if tables.group[script, lane] == tables.group[script, best]:
                own += share
    score = own / whole
    if score < least_score:
        return -1, 0.0
    return best, score


@entry
def identify(data, offsets, tables):
    """(script int64 [n], lane int64 [n], probability float64 [n]) of the texts; lane -1 is unknown."""
    n = len(offsets) - 1
    scripts = np.zeros(n, np.int64)
    lanes = np.full(n, -1, np.int64)
    scores = np.zeros(n, np.float64)
    scratch = _scratch()
    for text in range(n):
        script, k = _sum(data, offsets[text], offsets[text + 1], tables, scratch)
        scripts[text] = script
        if k > 0:
            lanes[text], scores[text] = _answer(scratch.sums, k, script, scratch.votes, scratch.seen, tables)
    return scripts, lanes, scores


@entry
def weigh(data, offsets, tables):
    """The inputs of training for each text: (script int64 [n], n-grams int64 [n], sums int32 [n, M])."""
    n = len(offsets) - 1
    scripts = np.zeros(n, np.int64)
    grams = np.zeros(n, np.int64)
    all_sums = np.zeros((n, tables.fit.shape[1]), np.int32)
    scratch = _scratch()
    for text in range(n):
        scripts[text], grams[text] = _sum(data, offsets[text], offsets[text + 1], tables, scratch)
        if grams[text] > 0:
            all_sums[text] = scratch.sums[: all_sums.shape[1]]
    return scripts, grams, all_sums


@entry
def count(data, offsets, letters):
    """int32 [scripts, 2^BUCKET_BITS]: how often each n-gram occurs in texts of each script."""
    counts = np.zeros((MARK, 1 << BUCKET_BITS), np.int32)
    scratch = _scratch()
    for text in range(len(offsets) - 1):
        length = _read(data, offsets[text], offsets[text + 1], letters, scratch)
        script = _script(scratch.votes)
        for i in range(_grams(scratch.codes, length, script, scratch.buckets)):
            counts[script, scratch.buckets[i]] += 1
    return counts
