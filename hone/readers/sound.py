"""Sound: texts of a batch that need no change stay as they are, found in one pass over their bytes; the others are processed one by one."""

from __future__ import annotations

import numpy as np

from hone.readers.documents import NUL_REMOVED, Fault, Noted, settle
from hone.text.batch import Texts
from hone.text.sound import ODD, UNTIDY, look, plain_bytes, tables, tidy


def settle_batch(texts: Texts) -> tuple[Texts, np.ndarray, list[Fault | Noted]]:
    """(the documents among `texts` as stored, their indices int64 [k], a Fault for each of the others and a Noted for each repair).

    Equal to documents.settle of each text; the texts are not copied when none of them changes.
    """
    states = look(texts.data, texts.offsets, plain_bytes(), *tables())
    if not states.any():
        return texts, np.arange(texts.num_texts), []
    faults: list[Fault | Noted] = []
    settled: list[bytes] = []
    same = not (states == UNTIDY).any()
    for index in np.flatnonzero(states == ODD):
        raw = bytes(texts.data[texts.offsets[index] : texts.offsets[index + 1]])
        try:
            reason, text = settle(raw.decode())
        except UnicodeDecodeError:
            reason, text = "wrong_encoding", raw[:1000].decode("utf8", "replace")
        if reason:
            faults.append(Fault(reason, "" if reason == "empty" else text, len(raw)))
        elif b"\0" in raw:
            faults.append(NUL_REMOVED)
        settled.append(b"" if reason else text.encode())
        same &= settled[-1] == raw
    if same:  # none of them changes
        return texts, np.arange(texts.num_texts), faults
    starts = np.cumsum([0, *map(len, settled)]).astype(np.int64)
    new = np.frombuffer(b"".join(settled), np.uint8)
    data, offsets = tidy(texts.data, texts.offsets, states, new, starts)
    sizes = np.diff(offsets)
    kept = np.flatnonzero(sizes)
    blank = (sizes == 0) & (states == UNTIDY)
    faults += [Fault("empty", "", size) for size in np.diff(texts.offsets)[blank].tolist()]
    return Texts(data[: offsets[-1]], np.concatenate([offsets[:1], offsets[kept + 1]])), kept, faults
