"""Which pairs of texts are near-duplicates for a library: run by an interpreter that has it, apart from this package's version.

    python peers_scripts.py {hone,datasketch,rensa} PAIRS.json OUT.json

PAIRS is a list of [text, text]. Writes for each pair whether the two share a band of 14 of 8 hashes. The peers take shingles of five
matches of \\w+, as in their documentation's examples and datatrove's default for languages without a tokenizer.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_BANDS, _ROWS, _WORDS = 14, 8, 5


def shingles(text: str) -> list[str]:
    """Runs of five words."""
    words = re.findall(r"\w+", text.lower())
    n = max(min(_WORDS, len(words)), 1)
    return [" ".join(words[first : first + n]) for first in range(len(words) - n + 1)] if words else []


def hone(pairs: list[list[str]]) -> list[bool]:
    """The version of this package that is on the path."""
    from hone.data.dedup.minhash import MinHash
    from hone.text.batch import Texts

    keys, worded = MinHash().keys(Texts.of([text for pair in pairs for text in pair]))
    return ((keys[:, ::2] == keys[:, 1::2]).any(0) & worded[::2] & worded[1::2]).tolist()


def datasketch(pairs: list[list[str]]) -> list[bool]:
    """Its MinHash."""
    import xxhash
    from datasketch import MinHash

    first = MinHash(_BANDS * _ROWS, seed=1, hashfunc=xxhash.xxh32_intdigest)

    def signed(text: str) -> list[int]:
        sketch, runs = first.copy(), shingles(text)
        if runs:
            sketch.update_batch([run.encode() for run in runs])
        return sketch.hashvalues.tolist()

    return [_share(*map(signed, pair)) for pair in pairs]


def rensa(pairs: list[list[str]]) -> list[bool]:
    """Its RMinHash."""
    from rensa import RMinHash

    def signed(text: str) -> list[int]:
        sketch = RMinHash(_BANDS * _ROWS, 1)
        sketch.update(shingles(text))
        return list(sketch.digest())

    return [_share(*map(signed, pair)) for pair in pairs]


def _share(one: list[int], other: list[int]) -> bool:
    """Whether two signatures agree in a band."""
    return any(one[at : at + _ROWS] == other[at : at + _ROWS] for at in range(0, _BANDS * _ROWS, _ROWS))


if __name__ == "__main__":
    found = {"hone": hone, "datasketch": datasketch, "rensa": rensa}[sys.argv[1]](
        json.loads(Path(sys.argv[2]).read_text(encoding="utf8"))
    )
    Path(sys.argv[3]).write_text(json.dumps(found))
