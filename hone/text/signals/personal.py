"""Kernels that count matches of personal data: e-mail addresses, public IPv4 addresses, telephone and card numbers."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import kernel
from hone.text.segment import next_within

DOT, DASH, AT, PLUS, ZERO, NINE = (ord(char) for char in ".-@+09")
_LOCAL = np.zeros(256, np.bool_)
_LOCAL[
    np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~.-", np.uint8)
] = True
_GAP = np.zeros(256, np.bool_)
_GAP[np.frombuffer(b" .()-", np.uint8)] = True
MAX_LOCAL, MAX_DOMAIN, MAX_LABEL = 64, 253, 63


@kernel
def _letter(byte: int) -> bool:
    return 65 <= byte <= 90 or 97 <= byte <= 122


@kernel
def _digit(byte: int) -> bool:
    return 48 <= byte <= 57


@kernel
def _wordlike(byte: int) -> bool:
    return _letter(byte) or _digit(byte) or byte == 95


@kernel
def _domain(data: np.ndarray, first: int, end: int) -> bool:
    """Whether data[first:end] is a domain: at least two labels of letters, digits and inner hyphens, the last of letters."""
    labels, label, letters = 0, first, True
    if end - first > MAX_DOMAIN:
        return False
    for place in range(first, end + 1):
        if place < end and data[place] != DOT:
            letters = letters and _letter(data[place])
            continue
        size = place - label
        if size == 0 or size > MAX_LABEL or data[label] == DASH or data[place - 1] == DASH:
            return False
        labels += 1
        if place == end:
            return labels > 1 and size > 1 and letters
        label, letters = place + 1, True
    return False


@kernel
def emails(data: np.ndarray, start: int, end: int) -> int:
    """Number of e-mail addresses: a local part of 1 to 64 characters (RFC 5321, unquoted), '@' and a domain."""
    count = 0
    after = start
    while True:
        place = next_within(data, after, end, AT, AT)
        if place == end:
            return count
        after = place + 1
        first = place
        while first > start and _LOCAL[data[first - 1]] and place - first <= 4 * MAX_LOCAL:
            first -= 1
        while first < place and not (_letter(data[first]) or _digit(data[first])):
            first += 1
        if first == place or place - first > MAX_LOCAL or data[place - 1] == DOT:
            continue
        doubled = False
        for index in range(first, place - 1):
            doubled = doubled or (data[index] == DOT and data[index + 1] == DOT)
        last = place + 1
        while (
            last < end
            and last - place <= MAX_DOMAIN + 1
            and (_letter(data[last]) or _digit(data[last]) or data[last] == DOT or data[last] == DASH)
        ):
            last += 1
        while last > place + 1 and (data[last - 1] == DOT or data[last - 1] == DASH):
            last -= 1
        count += not doubled and _domain(data, place + 1, last)


@kernel
def public(address: int) -> bool:
    """Whether an IPv4 address, as a number, is public (not in IANA's special ranges or multicast)."""
    a, b, c = address >> 24, address >> 16 & 255, address >> 8 & 255
    if a == 0 or a == 10 or a == 127 or a >= 224:
        return False
    if (a == 100 and 64 <= b < 128) or (a == 169 and b == 254) or (a == 172 and 16 <= b < 32):
        return False
    if a == 192:
        return not (b == 168 or (b == 0 and (c == 0 or c == 2)))
    if a == 198:
        return not (b == 18 or b == 19 or (b == 51 and c == 100))
    return not (a == 203 and b == 0 and c == 113)


@kernel
def _address(data: np.ndarray, place: int, end: int) -> tuple[int, int]:
    """(address or -1, the end of the digits and dots that begin at `place`)."""
    value, part, digits, parts = 0, 0, 0, 0
    good = True
    stop = place
    while stop < end and (_digit(data[stop]) or (data[stop] == DOT and stop + 1 < end and _digit(data[stop + 1]))):
        if data[stop] == DOT:
            value, part, digits, parts = value << 8 | part, 0, 0, parts + 1
            good = good and parts < 4
        else:
            good = good and not (digits > 0 and part == 0) and digits < 3
            part, digits = min(part * 10 + np.int64(data[stop]) - 48, 1000), digits + 1
            good = good and part < 256
        stop += 1
    if not good or parts != 3 or (stop < end and _wordlike(data[stop])):
        return -1, stop
    return value << 8 | part, stop


@kernel
def _luhn(data: np.ndarray, first: int, end: int) -> bool:
    """Whether the digits of data[first:end] have Luhn's check digit and are not all the same."""
    total, place, seen, same, last = 0, 0, np.uint8(0), True, np.uint8(0)
    for index in range(end - 1, first - 1, -1):
        byte = data[index]
        if not _digit(byte):
            continue
        digit = np.int64(byte) - 48
        if place & 1:
            digit = digit * 2 - (9 if digit > 4 else 0)
        same = same and (place == 0 or byte == seen)
        seen = byte
        total += digit
        place += 1
        last = byte
    return total % 10 == 0 and not same and 50 <= last <= 54


@kernel
def numbers(data: np.ndarray, start: int, end: int, out: np.ndarray, firsts: np.ndarray, ends: np.ndarray) -> None:
    """Counts public IPv4 addresses, telephone-like and card-like numbers of data[start:end] into `out` (int64 [3]).

    Groups of digits with at most two of space, dot, hyphen and brackets between them are one run. A run after '+' of 8 to 15
    digits is a telephone number (E.164); so are three groups of 3, 3 and 4 digits whose first two begin with 2 to 9 (North
    America). One group of 13 to 19 digits, or four of 4, or 4-6-5, that begin with 2 to 6 and pass Luhn's check are a card.
    """
    out[:] = 0
    place = start
    while True:
        place = next_within(data, place, end, ZERO, NINE)
        if place == end:
            return
        if place > start and _wordlike(data[place - 1]):
            while place < end and _digit(data[place]):
                place += 1
            continue
        address, stop = _address(data, place, end)
        if address >= 0 and not (place > start and data[place - 1] == DOT):
            out[0] += public(address)
            place = stop
            continue
        plus = place > start and data[place - 1] == PLUS
        run, digits, groups, found = place, 0, 0, 0
        while True:  # a group of digits
            stop = run
            while stop < end and _digit(data[stop]):
                stop += 1
            for index in range(3):
                firsts[index], ends[index] = firsts[index + 1], ends[index + 1]
            firsts[3], ends[3] = run, stop
            digits += stop - run
            groups += 1
            kind = _group_kind(data, firsts, ends, groups)
            if kind:
                found += 1
                out[kind] += 1
                groups = 0
            run = stop
            while run < end and run - stop < 3 and _GAP[data[run]]:
                run += 1
            if run == stop or run == end or run - stop > 2 or not _digit(data[run]):  # noqa: SIM109
                break
        if plus and found == 0 and 8 <= digits <= 15 and data[place] != 48:
            out[1] += 1
        place = stop


@kernel
def _group_kind(data: np.ndarray, firsts: np.ndarray, ends: np.ndarray, groups: int) -> int:
    """0, or 1 for a telephone number, 2 for a card number, that ends with the last of up to four groups of digits."""
    size = ends[3] - firsts[3]
    if 13 <= size <= 19:
        return 2 if _luhn(data, firsts[3], ends[3]) else 0
    if groups < 3:
        return 0
    before, second = ends[2] - firsts[2], ends[1] - firsts[1]
    if size == 4 and before == 3 and second == 3 and data[firsts[1]] > 49 and data[firsts[2]] > 49:
        return 1
    if size == 5 and before == 6 and second == 4:
        return 2 if _luhn(data, firsts[1], ends[3]) else 0
    if groups > 3 and size == 4 and before == 4 and second == 4 and ends[0] - firsts[0] == 4:
        return 2 if _luhn(data, firsts[0], ends[3]) else 0
    return 0
