"""The peers of substring deduplication: run by an interpreter that has them, apart from hone.

    python peers_edits.py FOLDER

FOLDER/text.npy holds all texts (uint8), a zero byte after each. Writes FOLDER/marked.npy, bool: bytes of a substring of 100
bytes that occurs earlier, and prints {"seconds": process CPU time, "extra_megabytes": peak above text and libraries}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
from pydivsufsort import divsufsort, kasai

_LENGTH = 100


def marked(text: np.ndarray) -> np.ndarray:
    """bool [n]: suffixes in order; neighbours that share 100 bytes are one group, and all but its first repeat it."""
    order = divsufsort(text)
    shared = kasai(text, order)
    fresh = np.ones(len(text), bool)
    fresh[1:] = shared[: len(text) - 1] < _LENGTH
    firsts = np.flatnonzero(fresh)
    sizes = np.diff(np.append(firsts, len(text)))
    least = np.repeat(np.minimum.reduceat(order, firsts), sizes)
    starts = order[order != least].astype(np.int64)
    ends = np.append(np.flatnonzero(text == 0), len(text))
    starts = starts[ends[np.searchsorted(ends, starts)] - starts >= _LENGTH]
    change = np.zeros(len(text) + 1, np.int64)
    change[starts] += 1
    change[starts + _LENGTH] -= 1
    return np.cumsum(change[:-1]) > 0


def main() -> None:
    """Reads, marks, writes."""
    folder = Path(sys.argv[1])
    text = np.load(folder / "text.npy")
    marked(text[:1000].copy())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    found = marked(text)
    seconds = time.process_time() - start
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    np.save(folder / "marked.npy", found)
    print(json.dumps({"seconds": seconds, "extra_megabytes": extra}))


if __name__ == "__main__":
    main()
