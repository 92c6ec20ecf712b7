"""Kernels of substring deduplication: rolling hashes of windows of text, and their sampling."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry

_BASE = np.uint64(0x9FB21C651E98DF25)
_FINAL = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


@entry
def _leaving(length: int) -> np.ndarray:
    """uint64 [256]: the term of each byte in the rolling hash when it leaves a window of `length` bytes."""
    power = np.uint64(1)
    for _ in range(length):
        power *= _BASE
    table = np.empty(256, np.uint64)
    for byte in range(256):
        table[byte] = np.uint64(byte + 1) * power
    return table


@entry
def _mixed(value: np.uint64) -> np.uint64:
    """A bijection of 64-bit numbers in which every input bit changes about half of the output bits."""
    value = (value ^ (value >> _SHIFT)) * _FINAL
    return value ^ (value >> _SHIFT)


@entry
def runs_of(
    data: np.ndarray, offsets: np.ndarray, length: int, gram: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, start, count, key, whole): every window of `length` bytes of every text, in runs of equal key.

    The key of a window is the least hash of its substrings of `gram` bytes, so equal windows have equal keys wherever
    they are (winnowing). Run r holds the windows that begin at start[r] .. start[r] + count[r] - 1;
    two runs of equal `whole` hold the same windows in the same order.
    """
    # On average a run is half as long as there are substrings in a window; for texts with shorter runs the arrays grow.
    room = 3 * (offsets[-1] - offsets[0]) // (length - gram + 1) + 16
    text, start, count = np.empty(room, np.int32), np.empty(room, np.uint32), np.empty(room, np.uint16)
    key, whole = np.empty(room, np.uint64), np.empty(room, np.uint64)
    size = 1
    while size < length - gram + 1:
        size *= 2
    ring = np.empty(size, np.uint64)
    out_gram, out_window = _leaving(gram), _leaving(length)
    total = 0
    for number in range(len(offsets) - 1):
        one = data[offsets[number] : offsets[number + 1]]
        if len(one) < length:
            continue
        while True:
            found = _runs_of_one(
                one, length, gram, ring, out_gram, out_window, start[total:], count[total:], key[total:], whole[total:]
            )
            if found >= 0:
                break
            room *= 2
            text, start, count = _grown(text, room), _grown(start, room), _grown(count, room)
            key, whole = _grown(key, room), _grown(whole, room)
        text[total : total + found] = number
        total += found
    return text[:total], start[:total], count[:total], key[:total], whole[:total]


@entry
def _runs_of_one(
    data: np.ndarray,
    length: int,
    gram: int,
    ring: np.ndarray,
    out_gram: np.ndarray,
    out_window: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    key: np.ndarray,
    whole: np.ndarray,
) -> int:
    """Writes the runs of one text of at least `length` bytes; returns their number, -1 when the arrays are full.

    `ring` holds the latest hashes; its size is a power of two and at least the number of substrings in a window.
    """
    mask = np.uint64(len(ring) - 1)
    of_gram = of_window = of_first = np.uint64(0)
    best = np.uint64(0xFFFFFFFFFFFFFFFF)
    best_at = 0
    run_at = run = np.int64(-1)
    total = 0
    for at in range(len(data)):
        byte = np.uint64(data[at]) + np.uint64(1)
        before = of_window
        of_gram = of_gram * _BASE + byte
        of_window = of_window * _BASE + byte
        if at >= gram:
            of_gram -= out_gram[data[at - gram]]
        if at >= length:
            of_window -= out_window[data[at - length]]
        place = at - gram + 1
        if place < 0:
            continue
        value = _mixed(of_gram)
        ring[np.uint64(place) & mask] = value
        if value < best:
            best, best_at = value, place
        window = at - length + 1
        if window < 0:
            continue
        if best_at < window:
            best, best_at = value, place
            for back in range(place - 1, window - 1, -1):
                if ring[np.uint64(back) & mask] < best:
                    best, best_at = ring[np.uint64(back) & mask], back
        if best_at != run_at:
            if total + 1 >= len(start):
                return -1
            if run >= 0:
                count[total] = window - run
                whole[total] = _mixed(of_first + np.uint64(window - run)) ^ before
                total += 1
            run, run_at, of_first = window, best_at, of_window
            start[total], key[total] = window, best
    count[total] = len(data) - length + 1 - run
    whole[total] = _mixed(of_first + np.uint64(len(data) - length + 1 - run)) ^ of_window
    return total + 1


@entry
def _grown(array: np.ndarray, room: int) -> np.ndarray:
    wider = np.empty(room, array.dtype)
    wider[: len(array)] = array
    return wider


@entry
def judge_runs(
    key: np.ndarray, whole: np.ndarray, rank: np.ndarray, start: np.ndarray, count: np.ndarray, length: int
) -> np.ndarray:
    """uint8 [k], for runs sorted by (key, rank, start): 0 keep, 1 all its windows occur earlier, 2 compare each window.

    When all runs of a key are equal and do not overlap, the later ones repeat the first. Otherwise windows are compared.
    """
    verdict = np.zeros(len(key), np.uint8)
    first = 0
    while first < len(key):
        last = first + 1
        same = True
        while last < len(key) and key[last] == key[first]:
            near = rank[last] == rank[last - 1] and start[last] - start[last - 1] < length + count[first]
            if near or whole[last] != whole[first] or count[last] != count[first]:
                same = False
            last += 1
        if last - first > 1:
            verdict[first:last] = 1 if same else 2
            if same:
                verdict[first] = 0
        first = last
    return verdict


@entry
def hash_windows(
    data: np.ndarray,
    offsets: np.ndarray,
    text: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    length: int,
    place: np.ndarray,
    out: np.ndarray,
) -> None:
    """Writes the hashes of the windows that begin at start[i] .. end[i] - 1 of text[i] to out[place[i]] and after."""
    leaving = _leaving(length)
    for number in range(len(text)):
        base = offsets[text[number]] + start[number]
        value = np.uint64(0)
        for at in range(base, base + length - 1):
            value = value * _BASE + np.uint64(data[at]) + np.uint64(1)
        base += length - 1
        for at in range(end[number] - start[number]):
            value = value * _BASE + np.uint64(data[base + at]) + np.uint64(1)
            if at:
                value -= leaving[data[base + at - length]]
            out[place[number] + at] = _mixed(value)


@entry
def gathered(values: np.ndarray, rows: np.ndarray, place: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
    """Copies `values`, the windows of each of `rows` in turn, to out[place[row]] and following."""
    done = 0
    for row in rows:
        for at in range(count[row]):
            out[place[row] + at] = values[done + at]
        done += count[row]


@entry
def later_windows(
    key: np.ndarray, rank: np.ndarray, start: np.ndarray, count: np.ndarray, hashes: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(run, first, last + 1) of every range of windows that occur earlier, without overlapping the earlier one.

    Runs are sorted by (key, rank, start); `hashes` holds those of their windows, run after run.
    """
    most = ranges = 16
    first = 0
    while first < len(key):
        last = first
        windows = 0
        while last < len(key) and key[last] == key[first]:
            windows += count[last]
            ranges += (count[last] + 1) // 2
            last += 1
        most = max(most, windows)
        first = last
    size = 16
    while size < 2 * most:
        size *= 2
    table, owner, begin = np.zeros(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    run, low, high = np.empty(ranges, np.int64), np.empty(ranges, np.int64), np.empty(ranges, np.int64)
    total = base = first = 0
    while first < len(key):
        last = first
        windows = 0
        while last < len(key) and key[last] == key[first]:
            windows += count[last]
            last += 1
        used = 16
        while used < 2 * windows:
            used *= 2
        table[:used] = 0
        mask = np.uint64(used - 1)
        for row in range(first, last):
            open_at = -1
            for at in range(count[row]):
                value = hashes[base + at]
                slot = value & mask
                while table[slot] and hashes[table[slot] - 1] != value:
                    slot = (slot + np.uint64(1)) & mask
                gone = False
                if table[slot]:
                    gone = rank[owner[slot]] != rank[row] or start[row] + at >= begin[slot] + length
                else:
                    table[slot], owner[slot], begin[slot] = base + at + 1, row, start[row] + at
                if gone and open_at < 0:
                    open_at = at
                if open_at >= 0 and (not gone or at == count[row] - 1):
                    stop = at + 1 if gone else at
                    run[total], low[total], high[total] = row, start[row] + open_at, start[row] + stop
                    total += 1
                    open_at = -1
            base += count[row]
        first = last
    return run[:total], low[:total], high[:total]
