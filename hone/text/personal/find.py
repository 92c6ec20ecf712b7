"""Find: the spans of personal data and secrets in a batch of texts, each with its kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.text.batch import Texts
from hone.text.personal import checks, secrets
from hone.text.personal.candidates import ASSIGNED, EMAIL, IBAN, IPV6, NUMBER, PREFIX, candidates

_KINDS = {
    EMAIL: ("email",),
    NUMBER: ("ip", "card", "ssn", "phone"),
    IPV6: ("ip",),
    IBAN: ("iban",),
    PREFIX: ("secret",),
    ASSIGNED: ("secret",),
}


def find(texts: Texts, kinds: Sequence[str], order: Sequence[str]) -> tuple[np.ndarray, ...]:
    """(text, start, end, rule, number of candidates) of every match of `kinds`: bytes in its text, and its kind's place in `order`.

    Matches are sorted by their place in `order`, so that where two overlap the later one counts (`Cuts.of`).
    """
    data, offsets = np.ascontiguousarray(texts.data), np.ascontiguousarray(texts.offsets)
    text, kind, start, end = candidates(data, offsets)
    wanted = np.array([bool({*_KINDS[number]} & {*kinds}) for number in range(len(_KINDS))])
    chosen = wanted[kind]
    text, kind, start, end = text[chosen], kind[chosen], start[chosen], end[chosen]
    rows: list[tuple[int, int, int, int]] = []
    place = {name: number for number, name in enumerate(order)}
    current, raw, limit = -1, b"", 0
    bases = offsets[text]
    places = zip(text.tolist(), kind.tolist(), (start - bases).tolist(), (end - bases).tolist())
    for number, what, at, stop in places:
        if number != current:  # a text of its own, so that no check sees its neighbours
            raw = data[offsets[number] : offsets[number + 1]].tobytes()
            current, limit = number, len(raw)
        found: tuple[int, int] | None
        if what == NUMBER:
            for name, span in checks.numbers(raw, at, stop, limit):
                if name in kinds:
                    rows.append((place[name], number, *span))
            continue
        name = _KINDS[what][0]
        if what == EMAIL:
            found = checks.email(raw, at, limit)
        elif what == IPV6:
            found = checks.ipv6(raw, at, stop, limit)
        elif what == IBAN:
            found = checks.iban(raw, at, limit)
        elif what == PREFIX:
            found = secrets.known(raw, at, limit)
        else:
            found = secrets.assigned(raw, at, stop, limit)
        if found and found[1] > found[0]:
            rows.append((place[name], number, *found))
    rows.sort()
    table = np.array(rows, np.int64).reshape(-1, 4)
    return table[:, 1], table[:, 2], table[:, 3], table[:, 0], len(text)
