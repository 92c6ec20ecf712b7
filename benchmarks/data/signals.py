"""Signals and rules: speed per core on natural English, and agreement of the verdicts with datatrove's.

    python -m benchmarks.data signals --data FOLDER --peers INTERPRETER_WITH_datatrove

INTERPRETER has datatrove; without one there are no peer values. Speeds are of one thread by process CPU time, best of
five (the peer: once, on the texts that the verdicts are compared on).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.corpus import grown
from hone.data import FILTERS
from hone.data.signals import signals_of
from hone.text.batch import Texts
from hone.text.normalize import normalize

RULES: dict[str, dict[str, Any]] = {
    "gopher_repetition": {},
    "gopher_quality": {},
    "c4": {"punctuated_lines": False},
    "fineweb": {},
}
"""Filters with the peer's options."""
_PIECE_CHARS = 6000
_BATCH_BYTES = 16 << 20


def natural(data: Path) -> list[str]:
    """Natural English: pieces of books and of Wikipedia, the bodies of web pages, news articles."""
    texts = []
    for path in sorted((data / "books").glob("en-*.gz")):
        book = normalize(gzip.decompress(path.read_bytes()).decode("utf8", "replace"))
        texts += [book[at : at + _PIECE_CHARS] for at in range(20_000, min(len(book) - 20_000, 200_000), _PIECE_CHARS)]
    wiki = normalize((data / "lm_text" / "wikitext2-raw-valid.txt").read_text(encoding="utf8"))
    texts += [wiki[at : at + _PIECE_CHARS] for at in range(0, len(wiki), _PIECE_CHARS)]
    with tarfile.open(data / "web" / "article-extraction-benchmark.tar") as archive:
        member = next(name for name in archive.getnames() if name.endswith("ground-truth.json"))
        pages = json.load(archive.extractfile(member))  # type: ignore[arg-type]
    texts += [page["articleBody"] for page in pages.values()]
    news = (data / "neardup" / "articles_100.train").read_text(encoding="utf8", errors="replace").splitlines()
    texts += [line.partition(" ")[2] for line in news]
    return [text for text in map(normalize, texts) if text]


def decide(texts: Texts) -> dict[str, np.ndarray]:
    """Filter to its verdicts (True: kept), from one computation of the signals."""
    columns: dict[str, np.ndarray] = dict(signals_of(texts))
    columns["kind"] = np.full(texts.num_texts, "text", object)
    columns["language"] = np.full(texts.num_texts, "en", object)
    return {name: FILTERS.read({"kind": name, **options}).decide(columns)[0] for name, options in RULES.items()}


def speed(texts: list[str]) -> tuple[float, int]:
    """(MB/s of process CPU time of signals and all RULES together, bytes)."""
    batches, size = [], 0
    for text in texts:
        if not batches or size > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    arrays = [Texts.of(batch) for batch in batches]
    decide(arrays[0])
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        for array in arrays:
            decide(array)
        seconds.append(time.process_time() - begun)
    num_bytes = sum(array.num_bytes for array in arrays)
    return num_bytes / 1e6 / min(seconds), num_bytes


def peer(texts: list[str], interpreter: Path) -> dict[str, Any]:
    """datatrove's verdicts on `texts`: see peers_signals.py."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "texts.json", Path(folder) / "out.json"
        source.write_text(json.dumps(texts))
        script = Path(__file__).with_name("peers_signals.py")
        subprocess.run(
            [str(interpreter), "-P", str(script), str(source), str(out)], check=True, stdout=subprocess.DEVNULL
        )
        return json.loads(out.read_text())


def rows(data: Path, peers: Path | None = None, megabytes: float = 30) -> list[dict[str, Any]]:
    """The rows of this benchmark: figure, value, unit, n, peer, peer_value, ratio, note."""
    made = grown(data, megabytes)
    english = [text for text, kind in zip(made.texts, made.kinds) if kind == "english"]
    natural_texts = natural(data)
    answer = peer(natural_texts, peers) if peers else {}
    num_bytes = sum(len(text.encode()) for text in natural_texts)
    peer_speed = num_bytes / 1e6 / sum(part["seconds"] for part in answer.values()) if answer else None
    result = []
    for name, texts, value in (("English", english, peer_speed), ("English, code, other", made.texts, None)):
        rate, size = speed(texts)
        result.append(
            {
                "figure": f"signals + rules, {name}",
                "value": rate,
                "unit": "MB/s",
                "n": len(texts),
                "peer": "datatrove" if value else "",
                "peer_value": value,
                "ratio": rate / value if value else None,
                "note": f"{size / 1e6:.0f} MB, one thread, signals with four filters",
            }
        )
    verdicts = decide(Texts.of(natural_texts))
    for name, part in answer.items():
        equal = verdicts[name] == np.array(part["keep"])
        result.append(
            {
                "figure": f"{name}: verdicts equal",
                "value": 100 * float(equal.mean()),
                "unit": "%",
                "n": len(equal),
                "peer": "datatrove",
                "peer_value": None,
                "ratio": None,
                "note": f"kept: hone {int(verdicts[name].sum())}, datatrove {sum(part['keep'])}; "
                f"datatrove alone {num_bytes / 1e6 / part['seconds']:.2f} MB/s",
            }
        )
    return result
