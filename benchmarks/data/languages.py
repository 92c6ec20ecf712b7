"""Statistics of languages for the limits of rules: writes hone/text/signals/languages.json.

    python -m benchmarks.data.languages DATA

DATA is the folder with langid/lingua-sentences-75x1000.jsonl.gz. For each language, over its different sentences:

- words: words of a sentence, the median over documents of 20 sentences, by that of English. The sources' sentences differ in
  length, so for languages with spaces it is kept within 2/3 to 3/2.
- chars: characters of a word, the median over the same documents, by that of English. For languages without spaces the largest of
  them: Latin words among single characters lengthen the mean.
- marked: share of sentences that end with a mark, by that of English, at most 1; 0 for Thai, which writes none: the source
  cut its text at full stops.
- grams: of all sentences as one document, the share of characters in the most frequent 2-, 3- and 4-gram of words and in 5-
  to 10-grams that occurred before, less that of English, at least 0. Unrelated sentences repeat only what the language repeats:
  little between spaces, much in single characters or clusters.
- stop_words: the most frequent words without digits, as many as make up the share of the text that Gopher's eight make up of
  English, at least eight and at most 64. English has Gopher's.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from hone.data.signals import signals_of
from hone.text.batch import Texts
from hone.text.normalize import normalize
from hone.text.signals import languages
from hone.text.tables import EDGE_PUNCTUATION, STOP_WORDS
from hone.text.units import words_of

_SENTENCES = 20
_LEAST_WORDS, _MOST_WORDS = 8, 64
_UNMARKED = ("th",)
_GRAMS = (*(f"top_{n}gram_chars" for n in (2, 3, 4)), *(f"dup_{n}gram_chars" for n in range(5, 11)))


def sentences(data: Path) -> dict[str, list[str]]:
    """{language: its different sentences}."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    with gzip.open(data / "langid" / "lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as lines:
        for line in lines:
            row = json.loads(line)
            found[row["lang"]][normalize(row["text"])] = None
    return {language: list(rows) for language, rows in sorted(found.items())}


def frequencies(rows: list[str], unspaced: bool) -> dict[str, float]:
    """{word: share of the words of `rows`} of those with a letter and without a digit, the most frequent first."""
    counts: Counter[str] = Counter()
    for row in rows:
        lowered = row.lower()
        counts.update(words_of(lowered) if unspaced else [word.strip(EDGE_PUNCTUATION) for word in lowered.split()])
    total = sum(counts.values())
    good = (word for word, _ in counts.most_common() if any(map(str.isalpha, word)) and not any(map(str.isdigit, word)))
    return {word: counts[word] / total for word in good}


def stop_words(shares: dict[str, float], goal: float) -> list[str]:
    """The most frequent words, until their shares sum to `goal`."""
    chosen: list[str] = []
    for word in list(shares)[:_MOST_WORDS]:
        if len(chosen) >= _LEAST_WORDS and sum(map(shares.__getitem__, chosen)) >= goal:
            break
        chosen.append(word)
    return chosen


def statistics(rows: list[str]) -> dict[str, object]:
    """The absolute statistics of one language's sentences."""
    documents = ["\n".join(rows[at : at + _SENTENCES]) for at in range(0, len(rows) - _SENTENCES + 1, _SENTENCES)]
    columns = signals_of(Texts.of(documents))
    whole = signals_of(Texts.of(["\n".join(rows)]))
    unspaced = bool(columns["unspaced_words"].mean() > 0.5)
    return {
        "unspaced": unspaced,
        "words": float(np.median(columns["words"] / columns["lines"])),
        "chars": float(np.median(columns["mean_word_chars"])),
        "marked": float(columns["punctuated_lines"].mean()),
        "grams": [float(whole[name][0]) for name in _GRAMS],
        "shares": frequencies(rows, unspaced),
    }


def table(found: dict[str, dict]) -> dict[str, dict]:
    """The file's rows: relative to English, rounded; the last for other languages without spaces."""
    english, rows = found["en"], {}
    goal = sum(english["shares"].get(word, 0) for word in STOP_WORDS)
    for code, one in found.items():
        words = one["words"] / english["words"]
        rows[code] = {
            "unspaced": one["unspaced"],
            "words": round(words if one["unspaced"] else min(max(words, 2 / 3), 3 / 2), 2),
            "chars": round(one["chars"] / english["chars"], 2),
            "marked": round(min(one["marked"] / english["marked"], 1), 2),
            "grams": [round(max(value - other, 0), 3) for value, other in zip(one["grams"], english["grams"])],
            "stop_words": list(STOP_WORDS) if code == "en" else stop_words(one["shares"], goal),
        }
    some = [rows[code] for code, one in found.items() if one["unspaced"]]
    for row in some:
        row["chars"] = max(one["chars"] for one in some)
    for code in _UNMARKED:
        rows[code]["marked"] = 0
    rows[languages.UNSPACED] = {
        "unspaced": True,
        "words": min(row["words"] for row in some),
        "chars": max(row["chars"] for row in some),
        "marked": 0,
        "grams": [max(values) for values in zip(*(row["grams"] for row in some))],
        "stop_words": [],
    }
    return rows


def main() -> None:
    """Writes the file."""
    found = {code: statistics(rows) for code, rows in sentences(Path(sys.argv[1])).items()}
    content = {
        "source": "pemistahl/lingua-py@754ce21122c0:language-testdata/sentences (Leipzig Corpora, CC BY 4.0), 1000 sentences each",
        "method": "benchmarks/data/languages.py; every statistic relative to English",
        "languages": table(found),
    }
    rows = content.pop("languages")
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
    body = ",\n".join(f"{json.dumps(code)}: {json.dumps(row, ensure_ascii=False)}" for code, row in rows.items())
    text = f'{{{head}"languages": {{\n{body}\n}}}}\n'
    Path(languages.__file__).with_suffix(".json").write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
