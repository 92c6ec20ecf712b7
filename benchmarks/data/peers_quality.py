"""A peer's quality classifier: fastText, trained and asked by an interpreter that has it, apart from hone.

    python peers_quality.py EXAMPLES.json OUT.json

EXAMPLES: {"learn": [texts], "targets": [1 or 0], "tested": [texts]}. Writes {"scores": [of tested], "train": CPU seconds,
"score": CPU seconds}. The settings are those of Li et al. 2024, arXiv:2406.11794: pairs of words, five epochs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path


def main(source: str, out: str) -> None:
    """Trains on the examples and scores the tested texts."""
    import fasttext

    given = json.loads(Path(source).read_text(encoding="utf8"))
    lines = [
        f"__label__{'good' if target else 'bad'} {' '.join(text.split())}"
        for text, target in zip(given["learn"], given["targets"])
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf8") as file:
        file.write("\n".join(lines))
        file.flush()
        begun = time.process_time()
        model = fasttext.train_supervised(file.name, wordNgrams=2, epoch=5, lr=0.1, dim=100, thread=1, verbose=0)
    train = time.process_time() - begun
    begun = time.process_time()
    found = [model.predict(" ".join(text.split()), k=2) for text in given["tested"]]
    score = time.process_time() - begun
    scores = [float(dict(zip(labels, chances)).get("__label__good", 0.0)) for labels, chances in found]
    Path(out).write_text(json.dumps({"scores": scores, "train": train, "score": score}), encoding="utf8")


if __name__ == "__main__":
    main(*sys.argv[1:])
