"""A kernel that writes each of several JSON values on a line of its own."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry


@entry
def one_line(data, state):
    """uint8 [m]: `data` with each value of the outermost array, or outside of one, on a line; `state` is kept between calls.

    `state` int64 [5]: whether in a string, whether after a backslash, the depth of brackets, the depth of the values (1 inside
    of an outermost array), whether a line end is due before the next value.
    """
    out = np.empty(2 * len(data), np.uint8)
    to = 0
    in_string, escaped, depth, base, pending = state[0], state[1], state[2], state[3], state[4]
    for code in data:
        if in_string:
            out[to] = code
            to += 1
            if escaped:
                escaped = 0
            elif code == 92:
                escaped = 1
            elif code == 34:
                in_string = 0
                pending = int(depth == base)
            continue
        if code == 10 or code == 13 or code == 32 or code == 9:
            out[to] = 32
            to += 1
            continue
        if depth == 0 and code == 91:  # an outermost array: its values are the rows
            depth, base = 1, 1
            continue
        if depth == base and base == 1 and code == 93:
            depth, base, pending = 0, 0, 1
            continue
        if depth == base and code == 44:
            out[to] = 10
            to += 1
            pending = 0
            continue
        if pending:
            out[to] = 10
            to += 1
            pending = 0
        out[to] = code
        to += 1
        if code == 34:
            in_string = 1
        elif code == 123 or code == 91:
            depth += 1
        elif code == 125 or code == 93:
            depth = max(depth - 1, base)
            pending = int(depth == base)
    state[0], state[1], state[2], state[3], state[4] = in_string, escaped, depth, base, pending
    return out[:to]
