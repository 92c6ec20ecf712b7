"""The kernel that finds where personal data or a secret may be, in one pass over the bytes; checks.py decides."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry, inlined

EMAIL, NUMBER, IPV6, IBAN, PREFIX, ASSIGNED = range(6)
"""Kinds of candidates: an '@' between word characters; a run of seven or more digits with what may separate them; colons between
hexadecimal digits; two capitals and two digits; the beginning of a known secret; '=' or ':' before a long word of letters and digits."""
_LETTER, _DIGIT, _GAP, _HEX, _TOKEN, _START, _TRIGGER = (1 << bit for bit in range(7))
_MIN_DIGITS, _MIN_TOKEN = 7, 16
PREFIXES = (
    b"AKIA", b"ASIA", b"AIza", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"gith", b"glpa", b"xoxa", b"xoxb", b"xoxp",
    b"xoxr", b"xoxs", b"xapp", b"hook", b"sk-a", b"sk-p", b"sk_l", b"sk_t", b"rk_l", b"rk_t", b"hf_", b"npm_", b"pypi",
    b"eyJ", b"ya29", b"----", b"sk-",
)  # fmt: skip
"""The first bytes of known secrets; checks.py has the whole patterns."""


def _classes() -> np.ndarray:
    """uint8 [256]: what each byte may be."""
    table = np.zeros(256, np.uint8)
    for byte in range(256):
        char = chr(byte) if byte < 128 else ""
        letter = char.isalpha() or byte >= 128 or char == "_"
        table[byte] |= _LETTER * letter | _DIGIT * char.isdigit() | _GAP * (char in " .()-/" and bool(char))
        table[byte] |= _HEX * (char in "0123456789abcdefABCDEF" and bool(char))
        table[byte] |= _TOKEN * (char.isalnum() or (char in "+/=_-.~" and bool(char)))
        starts = any(prefix[0] == byte for prefix in PREFIXES) or "A" <= char <= "Z"
        table[byte] |= _START * starts | _TRIGGER * (starts or char.isdigit() or (char in "@:=" and bool(char)))
    return table


_CLASSES = _classes()
_HEADS = np.array([int.from_bytes(prefix.ljust(4, b"\0"), "little") for prefix in PREFIXES], np.int64)
_MASKS = np.array([(1 << 8 * len(prefix)) - 1 for prefix in PREFIXES], np.int64)


@inlined
def _is(byte: int, kind: int) -> bool:
    return _CLASSES[byte] & kind != 0


@entry
def _number(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """(where the run of digits that begins at `start` ends, digits in it, as many as are asked for when it has three dots); up to two of
    space . ( ) - / may be between groups."""
    at, digits, last, dots = start, 0, start, 0
    while at < end:
        if _is(data[at], _DIGIT):
            digits += 1
            last = at + 1
        elif not _is(data[at], _GAP) or at - last >= 2:
            break
        dots += data[at] == 46
        at += 1
    return last, max(digits, _MIN_DIGITS if dots > 2 else 0)


@entry
def _has_prefix(data: np.ndarray, at: int, end: int) -> bool:
    if end - at < 16:
        return False
    head = (
        np.int64(data[at]) | np.int64(data[at + 1]) << 8 | np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24
    )
    known = False
    for number in range(len(_HEADS)):
        known |= head & _MASKS[number] == _HEADS[number]
    return known


@entry
def _assigned(data: np.ndarray, at: int, end: int) -> int:
    """Where the long word with letters and digits begins that is assigned by the '=' or ':' before `at`; -1 when there is none."""
    first = at
    while (
        first < end
        and first - at < 4
        and (data[first] == 32 or data[first] == 34 or data[first] == 39 or data[first] == 62)
    ):
        first += 1
    letters = digits = 0
    place = first
    while place < end and place - first < 256 and _is(data[place], _TOKEN):
        letters += _is(data[place], _LETTER)
        digits += _is(data[place], _DIGIT)
        place += 1
    return first if place - first >= _MIN_TOKEN and letters > 1 and digits else -1


@entry
def candidates(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, kind, start, end) of every candidate, each int64 [k]; start and end are places in `data`.

    For a number, start:end is the run of digits; for an assigned word, `end` is the place of the '=' or ':'.
    """
    room, count = 1024, 0
    found = np.empty((4, room), np.int64)
    for number in range(len(offsets) - 1):
        base, end = offsets[number], offsets[number + 1]
        at = base
        while at < end:
            byte = data[at]
            if not _is(byte, _TRIGGER):
                at += 1
                continue
            kind, start, stop, after = -1, at, at, at + 1
            inner = at > base and (_is(data[at - 1], _LETTER) or _is(data[at - 1], _DIGIT))
            if _is(byte, _DIGIT):
                after, digits = _number(data, at, end)
                if inner:  # digits of a name
                    after = at
                    while after < end and _is(data[after], _DIGIT):
                        after += 1
                elif digits >= _MIN_DIGITS:
                    kind, stop = NUMBER, after
                if after < end and data[after] == 58:
                    after = max(after - 4, at + 1)  # the first group of an address of version 6 may be digits
            elif byte == 64:
                if at > base and at + 3 < end and not _is(data[at + 1], _GAP) and not _is(data[at - 1], _GAP):
                    kind = EMAIL
            elif byte == 58 or byte == 61:
                if byte == 58 and at + 2 < end and at > base and _is(data[at - 1], _HEX):
                    near = at + 1
                    while near < end and near - at < 5 and _is(data[near], _HEX):
                        near += 1
                    if near < end and data[near] == 58:
                        kind, start = IPV6, at
                        while start > base and at - start < 4 and _is(data[start - 1], _HEX):
                            start -= 1
                        stop = at
                        while stop < end and (_is(data[stop], _HEX) or data[stop] == 58 or data[stop] == 46):
                            stop += 1
                        after = stop
                if kind < 0:
                    start = _assigned(data, at + 1, end)
                    kind = ASSIGNED if start >= 0 else -1
            elif not inner:
                if at + 14 < end and 65 <= byte <= 90 and 65 <= data[at + 1] <= 90 and _is(data[at + 2], _DIGIT):
                    kind = IBAN if _is(data[at + 3], _DIGIT) else -1
                if kind < 0 and _has_prefix(data, at, end):
                    kind = PREFIX
                    while byte == 45 and after < end and data[after] == 45:
                        after += 1
            if kind >= 0:
                if count == room:
                    room *= 2
                    wider = np.empty((4, room), np.int64)
                    wider[:, :count] = found
                    found = wider
                found[0, count], found[1, count], found[2, count], found[3, count] = number, kind, start, stop
                count += 1
            at = after
    return found[0, :count].copy(), found[1, :count].copy(), found[2, :count].copy(), found[3, :count].copy()
