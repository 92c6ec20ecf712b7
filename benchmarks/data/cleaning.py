"""Cleaning: masks of personal data beside Presidio, scrubadub and datatrove, C4's line rules beside datatrove, and pages kept.

    python -m benchmarks.data cleaning --data FOLDER --peers INTERPRETER_WITH_THEM

Values are generated (benchmarks/data/personal.py) with another seed than the one that the patterns were written with, but in the same
forms; books and code are the real texts in which what is masked is counted. Speeds are process CPU time of one thread, best of three.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.personal import Made, generated
from benchmarks.data.signals import natural
from hone.data import FILTERS
from hone.data.edits.mask import Mask
from hone.data.edits.page_lines import C4Lines, RefinedWebLines
from hone.data.signals import signals_of
from hone.text.batch import Texts

_SEED, _COUNT = 101, 400
_NOTICES = (
    "This site uses cookies to improve your visit.", "Read our privacy policy before you go on.",
    "By reading on you accept our terms of use.", "Please turn on JavaScript to see this page.",
)  # fmt: skip


def books(data: Path) -> list[str]:
    """Whole books."""
    return [
        gzip.decompress(path.read_bytes()).decode("utf8", "replace") for path in sorted((data / "books").glob("*.gz"))
    ]


def code(data: Path) -> list[str]:
    """Source files."""
    with gzip.open(data / "code" / "permissive-code.jsonl.gz", "rt", encoding="utf8") as file:
        return [json.loads(line)["text"] for line in file]


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """(best CPU seconds of three, the result), after one run that compiles."""
    work()
    times = []
    for _ in range(3):
        begun = time.process_time()
        result = work()
        times.append(time.process_time() - begun)
    return min(times), result


def spans_in(texts: list[str], spec: Mask) -> list[list[tuple[int, int, str]]]:
    """For each text the (start, end, kind) that are masked, in bytes."""
    found = spec.find(Texts.of(texts))
    rows: list[list[tuple[int, int, str]]] = [[] for _ in texts]
    for text, start, end, rule in zip(*(part.tolist() for part in found[:4])):
        rows[text].append((start, end, spec.rule_names[rule]))
    return rows


def judged(made: list[Made], spans: list[list[tuple[int, int, str]]]) -> dict[str, tuple[float, int]]:
    """{kind: (share of its values that are covered, values)}, and 'precision': the share of spans that overlap a value."""
    covered: dict[str, list[bool]] = defaultdict(list)
    right: list[bool] = []
    for row, found in zip(made, spans):
        raw = row.text.encode()
        low = raw.find(row.value.encode()) if row.kind else -1
        high = low + len(row.value.encode())
        right += [bool(row.kind) and start < high and end > low for start, end, _ in found]
        if row.kind:
            hidden = {at for start, end, _ in found for at in range(start, end)}
            # separators may stay, nothing else
            covered[row.kind].append(all(at in hidden for at in range(low, high) if chr(raw[at]).isalnum()))
    result = {kind: (float(np.mean(values)), len(values)) for kind, values in covered.items()}
    return {**result, "precision": (float(np.mean(right)) if right else 1.0, len(right))}


def asked(python: str | None, task: str, texts: list[str]) -> dict[str, Any]:
    """What peers_cleaning.py answers for `task`."""
    if python is None:
        return {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "texts.json"
        path.write_text(json.dumps(texts), encoding="utf8")
        script = Path(__file__).with_name("peers_cleaning.py")
        done = subprocess.run([python, "-P", str(script), task, str(path)], capture_output=True, text=True)
    if done.returncode:
        print(f"{task} did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def masks(data: Path, peers: str | None) -> list[dict[str, Any]]:
    """Rows of recall, precision, matches in real text, speed."""
    spec, rows = Mask(), []
    made = generated(_SEED, _COUNT)
    texts = [row.text for row in made]
    ours = judged(made, spans_in(texts, spec))
    others = {}
    for peer in ("presidio", "scrubadub", "datatrove"):
        answer = asked(peers, peer, texts)
        if answer:
            others[peer] = judged(made, [[(*span, "") for span in found] for found in answer["spans"]])
    for kind, (value, count) in ours.items():
        row = {
            "figure": f"mask, generated: {kind if kind == 'precision' else kind + ', recall'}",
            "value": value,
            "unit": "",
            "n": count,
        }
        rows.append(row)
        rows += [{**row, "peer": peer, "peer_value": theirs[kind][0]} for peer, theirs in others.items()]
    rows += unseen(spec, peers)
    for label, some in (("books", books(data)), ("code", code(data))):
        size = sum(len(text.encode()) for text in some) / 1e6
        batch = Texts.of(some)
        seconds, found = best(lambda batch=batch: spec.find(batch))
        counts = {name: int((found.rule == place).sum()) for place, name in enumerate(spec.rule_names)}
        note = f"by kind: { {name: count for name, count in counts.items() if count} }"
        rows.append(
            {
                "figure": f"mask, {label}: matches",
                "value": sum(counts.values()) / size,
                "unit": "a MB",
                "n": len(some),
                "note": note,
            }
        )
        part = [text[:40_000] for text in some][:40]
        for peer in ("presidio", "scrubadub", "datatrove"):
            answer = asked(peers, peer, part)
            if answer:
                small = sum(len(text.encode()) for text in part) / 1e6
                speed = {"peer": peer, "peer_value": small / answer["seconds"]}
                number = sum(map(len, answer["spans"])) / small
                mine = sum(map(len, spans_in(part, spec))) / small
                rows.append(
                    {
                        "figure": f"mask, {label}: speed",
                        "value": size / seconds,
                        "unit": "MB/s per core",
                        "n": len(some),
                        **speed,
                    }
                )
                rows.append(
                    {
                        "figure": f"mask, {label}, first 40 kB of each: matches",
                        "value": mine,
                        "unit": "a MB",
                        "n": len(part),
                        "peer": peer,
                        "peer_value": number,
                    }
                )
    return rows


def unseen(spec: Mask, peers: str | None) -> list[dict[str, Any]]:
    """Rows of the values of another generator, beside Presidio: a text counts when its value's kind is found in it."""
    made = asked(peers, "faker", []).get("rows", [])
    texts = [text for _, text in made]
    theirs = asked(peers, "presidio", texts).get("spans") if made else None
    rows = []
    found = spans_in(texts, spec)
    for kind in dict.fromkeys(kind for kind, _ in made):
        mine = [number for number, (other, _) in enumerate(made) if other == kind]
        row = {"figure": f"mask, faker: {kind}, recall", "unit": "", "n": len(mine)}
        row["value"] = float(np.mean([any(span[2] == kind for span in found[number]) for number in mine]))
        if theirs:
            row |= {
                "peer": "presidio, any kind",
                "peer_value": float(np.mean([bool(theirs[number]) for number in mine])),
            }
        rows.append(row)
    return rows


def pages(texts: list[str]) -> list[dict[str, Any]]:
    """Rows of pages lost for their notices: each text followed by the notices, as the filter was before and as it is now with the edit."""
    spoiled = ["\n".join([text, *_NOTICES]) for text in texts]
    batch = Texts.of(spoiled)
    columns: dict[str, np.ndarray] = dict(signals_of(batch))
    columns |= {"kind": np.full(len(texts), "text", object), "language": np.full(len(texts), "en", object)}
    clean = dict(signals_of(Texts.of(texts))) | {name: columns[name] for name in ("kind", "language")}
    before = {"kind": "c4", "max_word_chars": 1000, "max_javascript_lines": 0.1, "max_policy_lines": 0.1}
    lost = {}
    for label, options in (("before", before), ("now", {"kind": "c4"})):
        good = FILTERS.read(options).decide(clean)[0]
        lost[label] = int((good & ~FILTERS.read(options).decide(columns)[0]).sum())
    found = C4Lines(filter_no_terminal_punct=False, remove_citations=False, min_words_per_line=0).find(batch)
    names = C4Lines().rule_names
    cut = int(np.isin(found.rule, [names.index("policy"), names.index("javascript")]).sum())
    raw = [text.encode() for text in spoiled]
    wrong = sum(
        not any(
            notice.encode() in raw[text][start - (start > 0) : end] or raw[text][start:end].strip() in notice.encode()
            for notice in _NOTICES
        )
        for text, start, end in zip(found.text.tolist(), found.start.tolist(), found.end.tolist())
    )
    note = "four notices at the end of each page; before: commit b371072, whose filter dropped pages for them"
    return [
        {"figure": "c4: good pages lost for their notices", "value": float(lost["now"]), "unit": "pages", "n": len(texts), "peer": "before", "peer_value": float(lost["before"]), "note": note},
        {"figure": "c4_lines: notices cut", "value": cut / (len(_NOTICES) * len(texts)), "unit": "", "n": len(_NOTICES) * len(texts), "note": f"{wrong} spans of other lines"},
    ]  # fmt: skip


def lines(texts: list[str], peers: str | None) -> list[dict[str, Any]]:
    """Rows of speed, and of agreement with datatrove on whole texts."""
    batch, rows = Texts.of(texts), []
    theirs = asked(peers, "c4_lines", texts)
    for spec in (C4Lines(), RefinedWebLines()):
        seconds, found = best(lambda spec=spec: spec.find(batch))
        row: dict[str, Any] = {
            "figure": f"{spec.kind or type(spec).__name__}: speed",
            "value": batch.num_bytes / 1e6 / seconds,
            "unit": "MB/s per core",
            "n": len(texts),
        }
        row["figure"] = f"{type(spec).__name__}: speed"
        row["note"] = str({name: int((found.rule == place).sum()) for place, name in enumerate(spec.rule_names)})
        if theirs and isinstance(spec, C4Lines):
            row |= {"peer": "datatrove", "peer_value": batch.num_bytes / 1e6 / theirs["seconds"]}
        rows.append(row)
    if theirs:
        found, same = C4Lines().find(batch), 0
        gone: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for text, start, end in zip(found.text.tolist(), found.start.tolist(), found.end.tolist()):
            gone[text].append((start, end))
        for number, (text, other) in enumerate(zip(texts, theirs["texts"])):
            left = text.encode()
            for start, end in sorted(gone[number], reverse=True):
                left = left[:start] + left[end:]
            kept = [line.strip() for line in left.decode("utf8", "replace").split("\n") if line.strip()]
            same += kept == [line.strip() for line in other.split("\n") if line.strip()]
        rows.append(
            {"figure": "C4Lines: texts equal to datatrove's", "value": same / len(texts), "unit": "", "n": len(texts)}
        )
    return rows


def rows(data: Path, peers: str | None = None) -> list[dict[str, Any]]:
    """The rows of this benchmark."""
    texts = natural(data)
    return [*pages(texts), *lines(texts, peers), *masks(data, peers)]
