"""The hashed logistic scorer: speed, and how well it tells good text from bad, beside scikit-learn on the same texts.

    python -m benchmarks.data.quality --data ../shared/data

Speeds are megabytes of text per second of process CPU time of one thread, best of three. Movie reviews by polarity are no
quality, yet a task that words alone find hard; an encyclopedia against messages is an easy one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.corpus import corpus
from hone.data.quality.base import area_under_curve
from hone.data.quality.hashed_logistic import HashedLogistic
from hone.data.text.batch import Texts


def rows(data: Path, peers: str | None = None, megabytes: float = 20) -> list[dict[str, Any]]:
    """The rows of this benchmark; the peer is scikit-learn beside hone, if it is installed, so that `peers` is not needed."""
    result = []
    speed = None
    for task, (high, low, unseen_high, unseen_low) in tasks(data).items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sides = {"high": high, "low": low}
            paths = {side: (_write(folder / f"{side}.jsonl", texts),) for side, texts in sides.items()}
            spec = HashedLogistic(kind="hashed_logistic", piece_chars=100_000, held_out=0.01, epochs=8, **paths)
            begun = time.process_time()
            spec.train(folder)
            train_s = time.process_time() - begun
            opened = spec.open(folder)
            tested = Texts.of([*unseen_high, *unseen_low])
            truth = np.repeat([True, False], [len(unseen_high), len(unseen_low)])
            mine = area_under_curve(truth, opened.columns(tested)["quality"])
            peer = _scikit(high + low, np.repeat([1, 0], [len(high), len(low)]), list(tested.strings()))
            other = None if peer is None else area_under_curve(truth, peer[0])
            size = sum(len(text.encode()) for text in high + low) / 1e6
            result += [
                {
                    "figure": f"hashed_logistic, {task}: area under the curve",
                    "value": mine,
                    "unit": "1",
                    "n": len(truth),
                    **({} if other is None else {"peer": "scikit-learn", "peer_value": other, "ratio": mine / other}),
                },
                {
                    "figure": f"hashed_logistic, {task}: training",
                    "value": train_s,
                    "unit": "s",
                    "n": len(high) + len(low),
                    "note": f"{size:.1f} MB of seeds, {spec.epochs} epochs, reading and compiling included",
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
    return [*result, speed]


def tasks(data: Path) -> dict[str, tuple[list[str], list[str], list[str], list[str]]]:
    """{task: good and bad texts to learn from, good and bad ones to be tested on}."""
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


def _write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
    return str(path)


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
    mine = min(_seconds(lambda: opened.columns(batch)) for _ in range(3))
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
    other = part / _seconds(lambda: model.decision_function(reader.transform(some)))
    return {**row, "peer": "scikit-learn HashingVectorizer", "peer_value": other, "ratio": size / mine / other}


def _seconds(call: Any) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of real data")
    parser.add_argument("--peers", help="not needed here")
    parser.add_argument("--megabytes", type=float, default=20)
    options = parser.parse_args()
    for row in rows(options.data, options.peers, options.megabytes):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
