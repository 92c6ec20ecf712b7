"""Decontamination: evaluation items planted into real text, as they are and lightly edited; found ones and false ones.

    python -m benchmarks.data contamination --data FOLDER

`items` was tuned on arc_easy and gsm8k alone; the figures are those of hellaswag, lambada and mmlu. `ngrams` (13 words, each text
on its own) runs beside it on the same documents. Host texts are pieces of books, Wikipedia and web pages.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.dedup import write_shards
from benchmarks.data.edits import opened
from benchmarks.data.signals import natural
from hone.data.contamination.items import Items
from hone.data.contamination.ngrams import NGrams

TUNED, REPORTED = ("arc_easy", "gsm8k"), ("hellaswag", "lambada", "mmlu")
EDITS = ("verbatim", "case", "punctuation", "word", "whitespace", "latex")
_LETTERS = "ABCDEFGH"
_NOTE = "tuned on arc_easy and gsm8k; ngrams is the rule of commit b371072"


def evaluation_files(data: Path, folder: Path) -> dict[str, Path]:
    """The evaluation sets as files; mmlu's test questions are gathered into one."""
    base = data / "benchmarks"
    files = {
        "arc_easy": base / "arc_easy.jsonl",
        "gsm8k": base / "gsm8k-test.jsonl",
        "hellaswag": base / "hellaswag-2000.jsonl.gz",
        "lambada": base / "lambada_openai.jsonl",
        "mmlu": folder / "mmlu.jsonl",
    }
    with tarfile.open(base / "mmlu-dev-test.tar.gz") as archive, open(files["mmlu"], "w", encoding="utf8") as out:
        for member in sorted(archive.getnames()):
            if "/test/" not in member or not member.endswith(".csv"):
                continue
            table = csv.DictReader(io.TextIOWrapper(archive.extractfile(member), encoding="utf8"))  # type: ignore[arg-type]
            for row in table:
                choices = [row[f"choice{number}"] for number in range(4)]
                out.write(
                    json.dumps({"question": row["question"], "choices": choices, "answer": int(row["answer"])}) + "\n"
                )
    return files


def asked(name: str, row: dict[str, Any]) -> str:
    """An item as pages show it: the question, the choices with letters, the answer."""
    if name == "lambada":
        return f"{row['context']} {row['continuation']}"
    if name == "gsm8k":
        return f"{row['question']}\n{row['answer']}"
    choices = list(row["choices"].values()) if isinstance(row["choices"], dict) else row["choices"]
    question = row.get("question") or row["query"].removeprefix("Question: ")
    right = row.get("gold", row.get("answer", row.get("label", 0)))
    right = _LETTERS.index(right) if isinstance(right, str) and right in _LETTERS else int(right) % len(choices)
    lines = [
        question,
        *(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices)),
        f"Answer: {_LETTERS[right]}",
    ]
    return "\n".join(lines)


def edited(text: str, edit: str, draw: random.Random) -> str:
    """`text` with one kind of light edit."""
    if edit == "case":
        return draw.choice((text.lower, text.upper, text.title))()
    if edit == "punctuation":
        return re.sub(r"[.,;:?!'\"()-]", lambda _: draw.choice((" ", " ; ", " -- ", " ")), text)
    if edit == "word":
        parts = re.split(r"(\s+)", text)
        places = [at for at, part in enumerate(parts) if re.search(r"\w", part)]
        for low in range(0, len(places), 15):
            some = places[low : low + 15]
            if len(some) > 7:
                parts[draw.choice(some)] = draw.choice(("thing", "perhaps", "seven", "green"))
        return "".join(parts)
    if edit == "whitespace":
        return re.sub(r"\s+", lambda _: draw.choice((" ", "  ", "\n", "\t", " \n ")), text)
    if edit == "latex":
        return re.sub(
            r"\d+(?:\.\d+)?",
            lambda found: draw.choice(("${}$", "\\({}\\)", "$\\text{{{}}}$", "\\mathbf{{{}}}")).format(found.group()),
            text,
        )
    return text


def planted(
    files: dict[str, Path], names: tuple[str, ...], hosts: list[str], count: int, seed: int
) -> list[tuple[str, str, int, str]]:
    """(set, edit, row, document) of `count` items of each set with each edit, of eight words at least."""
    draw = random.Random(seed)
    made = []
    for name in names:
        with (gzip.open if files[name].suffix == ".gz" else open)(files[name], "rt", encoding="utf8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        long_enough = [number for number, row in enumerate(rows) if len(re.findall(r"\w+", asked(name, row))) >= 14]
        for edit in EDITS:
            for number in draw.sample(long_enough, min(count, len(long_enough))):
                host = draw.choice(hosts)
                at = host.find(" ", len(host) // 3) + 1
                made.append(
                    (name, edit, number, f"{host[:at]}\n{edited(asked(name, rows[number]), edit, draw)}\n{host[at:]}")
                )
    return made


def number_runs(count: int, seed: int) -> list[str]:
    """Tables of numbers, as are on many pages."""
    draw = random.Random(seed)
    kinds = (
        lambda: " ".join(str(number) for number in range(draw.randint(0, 9), 90)),
        lambda: " ".join(str(draw.randint(0, 1)) for _ in range(200)),
        lambda: "\n".join(" ".join(str(draw.randint(0, 12)) for _ in range(14)) for _ in range(12)),
        lambda: ", ".join(f"{number}, {number * 2}, {number * 3}" for number in range(40)),
        lambda: "0 " * 120,
    )
    return [f"Table {number}\n{draw.choice(kinds)()}" for number in range(count)]


def search(technique: NGrams, texts: list[str]) -> tuple[dict[int, set[tuple[str, int]]], float]:
    """({document: the (set, row) found in it}, process CPU seconds) of one search."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(texts, folder)
        corpus = opened(folder)
        everyone = np.ones(len(corpus), bool)
        examples, index, _ = technique._indexed()
        begun = time.process_time()
        hits = technique._search(corpus, everyone, folder, index)
        seconds = time.process_time() - begun
        where = {text: number for number, text in enumerate(texts)}
        order = {}
        for _, shard, first, _ in corpus.spans():
            for number, text in corpus.texts(shard, first, everyone):
                order[number] = where[text]
        found: dict[int, set[tuple[str, int]]] = {}
        for hit in np.concatenate(hits):
            at = int(np.searchsorted(index.keys, hit["key"]))
            for owner in index.owners[index.first[at] : index.first[at + 1]]:
                example = examples[owner]
                found.setdefault(order[int(hit["document"])], set()).add((example.evaluation, example.row))
    return found, seconds


def rows(
    data: Path, peers: str | None = None, names: tuple[str, ...] = REPORTED, count: int = 250
) -> list[dict[str, Any]]:
    """The rows of this benchmark."""
    result: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        files = evaluation_files(data, Path(place))
        sets = tuple(str(files[name]) for name in names)
        hosts = [text[:3000] for text in natural(data) if len(text) > 1200]
        made = planted(files, names, hosts, count, 1)
        tables = number_runs(300, 2)
        texts = [text for *_, text in made] + [f"{text} {number}" for number, text in enumerate(hosts + tables)]
        clean, numbers = range(len(made), len(made) + len(hosts)), range(len(made) + len(hosts), len(texts))
        found, speed = {}, {}
        for kind, technique in (("items", Items(evaluations=sets)), ("ngrams", NGrams(evaluations=sets))):
            search(technique, texts[:50])
            found[kind], seconds = search(technique, texts)
            speed[kind] = sum(len(text.encode()) for text in texts) / 1e6 / seconds

        def add(figure: str, value: dict[str, float], unit: str, n: int) -> None:
            row = {
                "figure": figure,
                "value": value["items"],
                "unit": unit,
                "n": n,
                "peer": "ngrams",
                "peer_value": value["ngrams"],
                "note": _NOTE,
            }
            result.append(row)

        for name in names:
            for edit in EDITS:
                mine = [number for number, (set_, kind, *_) in enumerate(made) if (set_, kind) == (name, edit)]
                recall = {
                    kind: float(
                        np.mean([(files[name].name, made[number][2]) in found[kind].get(number, ()) for number in mine])
                    )
                    for kind in found
                }
                add(f"{name}, {edit}: recall", recall, "", len(mine))
        light = [number for number, row in enumerate(made) if row[1] != "verbatim"]
        for label, mine in (
            ("all sets, verbatim", [n for n, row in enumerate(made) if row[1] == "verbatim"]),
            ("all sets, light edits", light),
        ):
            recall = {
                kind: float(np.mean([(files[made[n][0]].name, made[n][2]) in found[kind].get(n, ()) for n in mine]))
                for kind in found
            }
            add(f"{label}: recall", recall, "", len(mine))
        for label, some in (("clean documents", clean), ("tables of numbers", numbers)):
            add(
                f"{label} hit",
                {kind: float(sum(n in found[kind] for n in some)) for kind in found},
                "documents",
                len(some),
            )
        add("speed", speed, "MB/s per core", len(texts))
    return result
