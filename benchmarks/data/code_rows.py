"""Rows that look like code: how often it is right on real code and prose, and what looking costs beside measuring and identifying."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import corpus, english, other
from hone.data.identifiers import Own
from hone.data.signals import signals_of
from hone.text.batch import Texts
from hone.text.normalize import normalize
from hone.text.signals.code import looks_like_code

_LANGUAGES = {"py": "Python", "rs": "Rust", "c": "C", "sh": "shell", "md": "Markdown", "rst": "reStructuredText"}
_CODE = ("Python", "Rust", "C", "shell")


def rows(data: Path, peers: str | None, megabytes: float = 20) -> list[dict[str, Any]]:
    """The rows of this benchmark."""
    found, answers = [], {}
    for name, texts in labelled(data).items():
        batch = Texts.of([normalize(text) for text in texts])
        said = looks_like_code(batch, signals_of(batch))
        answers[name] = said
        found.append({"figure": f"rows called code: {name}", "value": float(said.mean()), "unit": "1", "n": len(said)})
    code = np.concatenate([answers[name] for name in _CODE])
    prose = np.concatenate([said for name, said in answers.items() if name not in _CODE])
    found += [
        {"figure": "rows called code: recall", "value": float(code.mean()), "unit": "1", "n": len(code)},
        {
            "figure": "rows called code: precision", "value": float(code.sum() / (code.sum() + prose.sum())), "unit": "1",
            "n": len(code) + len(prose),
        },
    ]  # fmt: skip
    for name, texts in (("mixed text", corpus(data, megabytes)), ("code", [*labelled(data)["Python"]] * 8)):
        found += _cost(name, [normalize(text) for text in texts])
    return found


def labelled(data: Path) -> dict[str, list[str]]:
    """Real texts by what they are: code by language, then sorts of prose."""
    found: dict[str, list[str]] = defaultdict(list)
    with gzip.open(data / "code/permissive-code.jsonl.gz", "rt", encoding="utf8") as lines:
        for line in lines:
            row = json.loads(line)
            found[_LANGUAGES[row["path"].rsplit(".", 1)[-1]]].append(row["text"])
    found["English prose"] = [text for _, text in english(data)]
    found["75 other languages"] = [text for _, text in other(data)]
    for line in (data / "benchmarks/gsm8k-test.jsonl").read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        found["sums in words (GSM8K)"].append(f"{row['question']}\n{row['answer']}")
    with tarfile.open(data / "benchmarks/mmlu-dev-test.tar.gz") as pack:
        for member in pack.getmembers():
            if member.name.endswith(".csv"):
                table = csv.reader(io.StringIO(pack.extractfile(member).read().decode()))  # type: ignore[union-attr]
                found["exam questions (MMLU)"] += ["\n".join(row) for row in list(table)[1:]]
    for line in (data / "quality/sms-spam.tsv").read_text(encoding="utf8").splitlines():
        found["text messages"].append(line.split("\t", 1)[-1])
    return {name: [text for text in texts if text.strip()] for name, texts in found.items()}


def _cost(name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Documents a second of one core, before and with it."""
    batch, identifier = Texts.of(texts), Own().open(())

    def measured() -> dict[str, np.ndarray]:
        codes, _ = identifier.identify_all(batch)
        return signals_of(batch, codes.tolist())

    columns = measured()
    before, _ = best_of(3, measured)
    looking, _ = best_of(3, lambda: looks_like_code(batch, columns))
    count = len(texts)
    return [
        {
            "figure": f"identifying, measuring and looking for code, {name}", "value": count / (before + looking), "unit": "documents/s",
            "n": 3, "peer": "without looking for code", "peer_value": count / before, "ratio": before / (before + looking),
        },
    ]  # fmt: skip
