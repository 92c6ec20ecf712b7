"""Scorers of quality: accuracy in separating good text from bad, and speed, against scikit-learn and fastText.

    python -m benchmarks.data quality --data FOLDER --peers INTERPRETER_WITH_scikit-learn,fasttext

Speeds are megabytes of text per second of process CPU time, hone's of one thread. Movie reviews by polarity are no quality,
yet a task that words alone find hard; an encyclopedia against messages is an easy one. Word salad is what chains of words
write, as web spam has it: after any two words comes one that came after them in real text, so that every three words in a row
are real and only the whole is not. A crawl is one part of good prose, one of salad, two of plain junk (program code, other
languages): the cascade should know the junk by the cheap scorer and ask the dear one about the rest.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
import zipfile
from collections import defaultdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import code, corpus, english, other
from hone.data.quality.base import area_under_curve
from hone.data.quality.cascade import Cascade
from hone.data.quality.hashed_logistic import HashedLogistic
from hone.text.batch import Texts

_PASSAGE_CHARS = 1200
_LEARN, _TEST = 1000, 400


def rows(data: Path, peers: str | None = None, megabytes: float = 20) -> list[dict[str, Any]]:
    """The rows of this benchmark; scikit-learn is a peer where hone's own interpreter has it, fastText where `peers` does."""
    result = []
    speed = None
    for task, (high, low, unseen_high, unseen_low) in tasks(data).items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spec = HashedLogistic(
                kind="hashed_logistic", piece_chars=100_000, held_out=0.01, epochs=8, **_seeds(folder, high, low)
            )
            begun = time.process_time()
            spec.train(folder)
            train_s = time.process_time() - begun
            opened = spec.open(folder)
            tested = Texts.of([*unseen_high, *unseen_low])
            truth = np.repeat([True, False], [len(unseen_high), len(unseen_low)])
            mine = area_under_curve(truth, opened.columns(tested)["quality"])
            peer = _scikit(high + low, np.repeat([1, 0], [len(high), len(low)]), list(tested.strings()))
            other_auc = None if peer is None else area_under_curve(truth, peer[0])
            size = sum(len(text.encode()) for text in high + low) / 1e6
            note = f"{size:.1f} MB of seeds, {spec.epochs} epochs, reading and compiling included"
            result += [
                _row(
                    f"hashed_logistic, {task}: area under the curve", mine, "1", len(truth), "scikit-learn", other_auc
                ),
                {
                    **_row(f"hashed_logistic, {task}: training", train_s, "s", len(high) + len(low)),
                    "note": note,
                    **(
                        {}
                        if peer is None
                        else {"peer": "scikit-learn", "peer_value": peer[1], "ratio": peer[1] / train_s}
                    ),
                },
            ]
            if speed is None:
                speed = _speed(opened, corpus(data, megabytes), high + low)
    assert speed is not None
    return [*result, speed, *order_of_words(data, peers)]


class Crawl(NamedTuple):
    """Passages for training and, of other documents, for testing."""

    high: list[str]
    low: list[str]
    good: list[str]
    salad: list[str]
    junk: list[str]


def crawl(data: Path) -> Crawl:
    """Good prose, word salad and plain junk, each in passages of about _PASSAGE_CHARS."""
    draw = random.Random(0)
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    for _, text in english(data):
        held = blake2b(text.encode()).digest()[0] < 40
        sides[held].extend(_passages(text))
    plain: tuple[list[list[str]], list[list[str]]] = ([], [])
    for kind in (code(data), other(data)):
        found: tuple[list[list[str]], list[list[str]]] = ([], [])
        for _, text in kind:
            found[blake2b(text.encode()).digest()[0] < 80].extend(_passages(text))
        for side, passages, most in zip(plain, found, (_LEARN // 4, _TEST)):
            side += draw.sample(passages, most)
    learn, tested = (draw.sample(side, len(side)) for side in sides)
    half = len(tested) // 2
    salad, unseen = _Salad(learn[_LEARN:]), _Salad(tested[half:])
    return Crawl(
        [" ".join(words) for words in learn[:_LEARN]],
        [salad.passage(draw) for _ in range(_LEARN)] + [" ".join(words) for words in plain[0]],
        [" ".join(words) for words in tested[:half][:_TEST]],
        [unseen.passage(draw) for _ in range(_TEST)],
        [" ".join(words) for words in plain[1]],
    )


def order_of_words(data: Path, peers: str | None) -> list[dict[str, Any]]:
    """hashed_logistic, neural and a cascade of the two on word salad and on a crawl."""
    given = crawl(data)
    tested = Texts.of([*given.good, *given.salad, *given.junk])
    truth = np.arange(tested.num_texts) < len(given.good)
    hard = np.arange(tested.num_texts) < len(given.good) + len(given.salad)
    size = tested.num_bytes / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeds = {**_seeds(folder, given.high, given.low), "held_out": 0.02, "piece_chars": 2000}
        parts = {"cheap": {"kind": "hashed_logistic", **seeds}, "dear": {"kind": "neural", **seeds}}
        spec = Cascade.read(parts)
        spec.cheap.train(folder / "quality" / "cheap")
        begun = time.process_time()
        spec.dear.train(folder / "quality" / "dear")
        train_s = time.process_time() - begun
        opened = {
            "hashed_logistic": spec.cheap.open(folder / "quality" / "cheap"),
            "neural": spec.dear.open(folder / "quality" / "dear"),
            "cascade": spec.open(folder),
        }
        found, seconds = {}, {}
        for kind, scorer in opened.items():
            scorer.columns(Texts.of(given.good[:1]))
            seconds[kind], found[kind] = best_of(
                3 if kind == "hashed_logistic" else 1, lambda scorer=scorer: scorer.columns(tested)
            )
    scores = {kind: columns["quality"] for kind, columns in found.items()}
    learn, targets = given.high + given.low, np.repeat([1, 0], [len(given.high), len(given.low)])
    others = {"scikit-learn": _scikit(learn, targets, list(tested.strings()))}
    others["fastText"] = _fasttext(peers, learn, targets, list(tested.strings())) if peers else None
    kept = {name: answer[0] for name, answer in others.items() if answer is not None}
    result = []
    for task, which in (("word salad", hard), ("crawl", np.ones(len(truth), bool))):
        areas = {name: area_under_curve(truth[which], answer[which]) for name, answer in kept.items()}
        best = max(areas, key=areas.__getitem__, default="")
        for kind, columns in scores.items():
            mine = area_under_curve(truth[which], columns[which])
            row = _row(f"{kind}, {task}: area under the curve", mine, "1", int(which.sum()), best, areas.get(best))
            result.append({**row, "note": ", ".join(f"{name} {area:.3f}" for name, area in areas.items())})
    auc = {kind: area_under_curve(truth, columns) for kind, columns in scores.items()}
    gain = (auc["cascade"] - auc["hashed_logistic"]) / (auc["neural"] - auc["hashed_logistic"])
    dear = found["cascade"]["quality_dear"]
    count = len(truth)
    return [
        *result,
        _row("cascade, crawl: share of the neural's gain in area that it keeps", gain, "1", count),
        _row("cascade, crawl: share of the texts that the neural one reads", float(dear.mean()), "1", count),
        _row("cascade, crawl: share of the neural's time", seconds["cascade"] / seconds["neural"], "1", count),
        *(
            {**_row(f"{kind}, crawl: scoring", size / taken, "MB/s per core", count), "note": f"{size:.1f} MB"}
            for kind, taken in seconds.items()
        ),
        {
            **_row("neural, crawl: training", train_s, "s", len(learn)),
            "note": f"{sum(map(len, learn)) / 1e6:.1f} MB of seeds, {spec.dear.epochs} epochs, CPU seconds of all threads",
        },
    ]


def _passages(text: str) -> list[list[str]]:
    """The words of `text` in runs of about _PASSAGE_CHARS; without the incomplete last run."""
    runs, words, size = [], [], 0
    for word in text.split():
        words.append(word)
        size += len(word) + 1
        if size >= _PASSAGE_CHARS:
            runs.append(words)
            words, size = [], 0
    return runs


class _Salad:
    """Writes passages by a chain of order 2 over the words of others."""

    def __init__(self, passages: list[list[str]]) -> None:
        self._following: dict[tuple[str, str], list[str]] = defaultdict(list)
        for words in passages:
            for one, two, three in zip(words, words[1:], words[2:]):
                self._following[one, two].append(three)
        self._pairs = list(self._following)

    def passage(self, draw: random.Random) -> str:
        one, two = draw.choice(self._pairs)
        words, size = [one, two], len(one) + len(two) + 2
        while size < _PASSAGE_CHARS:
            if (one, two) in self._following:
                one, two = two, draw.choice(self._following[one, two])
            else:  # the end of a passage
                one, two = draw.choice(self._pairs)
            words.append(two)
            size += len(two) + 1
        return " ".join(words)


def tasks(data: Path) -> dict[str, tuple[list[str], list[str], list[str], list[str]]]:
    """{task: good and bad texts for training, good and bad ones for testing}."""
    with zipfile.ZipFile(data / "quality" / "movie_reviews.zip") as file:
        names = [name for name in sorted(file.namelist()) if name.endswith(".txt")]
        good, bad = (
            [file.read(name).decode("latin1") for name in names if f"/{side}/" in name] for side in ("pos", "neg")
        )
    wiki = (data / "quality" / "high_quality_wiki_reference.txt").read_text(encoding="utf8")
    wiki += "\n" + (data / "lm_text" / "wikitext2-raw-valid.txt").read_text(encoding="utf8")
    paragraphs = list(dict.fromkeys(part.strip() for part in wiki.split("\n") if len(part) > 80))
    lines = (data / "quality" / "sms-spam.tsv").read_text(encoding="utf8").split("\n")
    messages = list(dict.fromkeys(line.partition("\t")[2] for line in lines if line))
    return {
        "reviews by polarity": (good[:800], bad[:800], good[800:], bad[800:]),
        "encyclopedia against messages": (paragraphs[::2], messages[::2], paragraphs[1::2], messages[1::2]),
    }


def _seeds(folder: Path, high: list[str], low: list[str]) -> dict[str, tuple[str, ...]]:
    """The fields of a scorer that learns from these texts, written into `folder`."""
    for name, texts in (("high", high), ("low", low)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf8")
    return {name: (str(folder / f"{name}.jsonl"),) for name in ("high", "low")}


def _row(figure: str, value: float, unit: str, n: int, peer: str = "", theirs: float | None = None) -> dict[str, Any]:
    """A row, with the peer's figure if there is one."""
    beside = {} if theirs is None else {"peer": peer, "peer_value": theirs, "ratio": value / theirs}
    return {"figure": figure, "value": value, "unit": unit, "n": n, **beside}


def _fasttext(peers: str, learn: list[str], targets: np.ndarray, tested: list[str]) -> tuple[np.ndarray, float]:
    """(scores of `tested`, CPU seconds of training) by fastText in the interpreter `peers`."""
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "examples.json", Path(name) / "scores.json"
        source.write_text(json.dumps({"learn": learn, "targets": targets.tolist(), "tested": tested}))
        script = str(Path(__file__).with_name("peers_quality.py"))
        subprocess.run([peers, script, str(source), str(out)], check=True)
        answer = json.loads(out.read_text())
    return np.array(answer["scores"]), answer["train"]


def _scikit(learn: list[str], targets: np.ndarray, tested: list[str]) -> tuple[np.ndarray, float] | None:
    """(scores of `tested`, CPU seconds of training) by scikit-learn; None where it is not installed."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return None
    begun = time.process_time()
    reader = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
    fitted = LogisticRegression(C=10, max_iter=300).fit(reader.fit_transform(learn), targets)
    seconds = time.process_time() - begun
    return fitted.decision_function(reader.transform(tested)), seconds


def _speed(opened: Any, texts: list[str], learn: list[str]) -> dict[str, Any]:
    """Scoring, beside scikit-learn's hashing and a linear model."""
    batch = Texts.of(texts)
    size = batch.num_bytes / 1e6
    opened.columns(Texts.of(texts[:1]))
    mine, _ = best_of(3, lambda: opened.columns(batch))
    row = {
        "figure": "hashed_logistic: scoring, words and pairs of words",
        "value": size / mine,
        "unit": "MB/s per core",
        "n": len(texts),
        "note": f"{size:.0f} MB",
    }
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
        from sklearn.linear_model import SGDClassifier
    except ImportError:
        return row
    reader = HashingVectorizer(ngram_range=(1, 2), n_features=1 << 18, token_pattern=r"\w+", alternate_sign=False)
    model = SGDClassifier(loss="log_loss", max_iter=1, tol=None).fit(reader.transform(learn), np.arange(len(learn)) % 2)
    some = texts[:: max(len(texts) // 500, 1)]
    part = sum(len(text.encode()) for text in some) / 1e6
    other = part / best_of(1, lambda: model.decision_function(reader.transform(some)))[0]
    return {**row, "peer": "scikit-learn HashingVectorizer", "peer_value": other, "ratio": size / mine / other}
