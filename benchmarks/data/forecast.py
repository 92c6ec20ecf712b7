"""Forecasts of `hone data` before many runs, compared with their measurements.

    python -m benchmarks.data forecast --data FOLDER [--megabytes 20]

Every case is a source made from real text and a spec, run in a process of its own. Sources are skewed on purpose: one large
file beside many tiny ones, sorted so that the beginning is unlike the end, a filter that keeps a tenth, copies that a
deduplication removes, compressed streams, pages. A sample is a fifth of a source that is grown, or the 16 MB that the stage samples. Errors are (estimate - measured) / measured. time_s is included, but is
only meaningful on an idle machine.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet

from benchmarks.data.corpus import Grown, code, english, grown
from benchmarks.data.scale import tokenizer

FIGURES = ("kept_documents", "kept_bytes", "train_tokens", "peak_memory_bytes", "time_s")
_GOOD = 0.2
_RUN = """
import json, sys
from hone.base.run import Run
from hone.data import forecast
from hone.data.stage import Data

spec, out, executor = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
forecast.SAMPLE_BYTES = min(forecast.SAMPLE_BYTES, int(sys.argv[4]))
stage = Data.read(spec)
planned = stage.plan({}, None)  # the same that `make` plans: a process samples a source once
stage.make(out, run=Run(quiet=True, executor=executor))
print(sum(split.documents for split in planned.facts.splits.values()))
"""


class Case(NamedTuple):
    """A run: `fill` writes the source into an empty folder (None: the spec names one), `spec` is the rest."""

    name: str
    fill: Callable[[Path], None] | None
    spec: dict[str, Any]
    workers: int = 0


def rows(data: Path, peers: str | None = None, megabytes: float = 20) -> list[dict[str, Any]]:
    """One row per case and figure, and one per figure with the fraction of cases within 20 %."""
    with tempfile.TemporaryDirectory() as work:
        found = []
        for case in cases(data, Path(work), megabytes):
            found.append((case.name, run(case, Path(work), megabytes * 2e5)))
            print(*(f"{row['figure']} {row['value']:.4f}" for row in ledger_rows(found[-1:])), sep="\n", flush=True)
        return ledger_rows(found)


def ledger_rows(found: list[tuple[str, dict[str, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The rows of cases (name, {figure: {value, estimate}})."""
    made: list[dict[str, Any]] = []
    for figure in FIGURES:
        errors = []
        for name, figures in found:
            said, value = figures[figure]["estimate"], figures[figure]["value"]
            if not said or not value:
                continue
            error = said["value"] / value - 1
            bound = {"bound": True} if said["bound"] else {}
            made.append(
                {"figure": f"forecast {name}: {figure}", "value": error, "unit": "relative error", "n": 1, **bound}
                | {"measured": value, "estimate": said["value"], "tolerance": said["tolerance"]}
            )
            errors.append(abs(error))
        within = sum(error <= _GOOD for error in errors) / max(len(errors), 1)
        made.append({"figure": f"forecast {figure} within 20 %", "value": within, "unit": "of cases", "n": len(errors)})
    return made


def run(case: Case, work: Path, sample_bytes: float) -> dict[str, dict[str, Any]]:
    """The figures of the case's run, by name."""
    source, out = work / "sources" / case.name, work / f"data-{case.name}"
    if case.fill and not source.exists():
        source.mkdir(parents=True)
        case.fill(source)
    shutil.rmtree(out, ignore_errors=True)
    spec = {"source": str(source), **case.spec}
    executor = {"kind": "processes", "workers": case.workers} if case.workers else {"kind": "serial"}
    given = [json.dumps(spec), str(out), json.dumps(executor), str(round(sample_bytes))]
    said = subprocess.run([sys.executable, "-c", _RUN, *given], check=True, stdout=subprocess.PIPE, text=True).stdout
    made = json.loads((out / "hone.json").read_text(encoding="utf8"))
    shutil.rmtree(out)
    figures = {row["name"]: row for row in made["figures"]}
    limits = figures["kept_bytes"]["estimate"]
    figures["kept_documents"]["estimate"] = {**limits, "value": float(said.split()[-1])}
    return figures


def cases(data: Path, work: Path, megabytes: float) -> Iterator[Case]:
    """All cases; text of about `megabytes` in those that are grown."""
    given = {"tokenizer": {"path": str(tokenizer(data, work))}}
    own = {"tokenizer": {"vocab_size": 4096}}
    tenth = {
        "filters": [{"kind": "expression", "when": "True", "keep": "language == 'fr' or kind == 'code'"}],
        "dedups": [],
    }
    whole = _texts(data, megabytes)
    small = _texts(data, megabytes / 10)
    english_first = [text for _, text in sorted(zip(whole.kinds, whole.texts), key=lambda row: row[0] != "english")]
    yield Case("library", None, {"source": "python", "tokenizer": {"vocab_size": 2048}})
    yield Case("small jsonl", lambda to: _jsonl(to / "rows.jsonl", small.texts), own)
    yield Case("jsonl, two workers", lambda to: _jsonl(to / "rows.jsonl", whole.texts), own, 2)
    yield Case("sorted parquet", lambda to: _parquet(to / "rows.parquet", english_first), given)
    yield Case("sorted jsonl.gz", lambda to: _jsonl(to / "rows.jsonl.gz", english_first), given)
    yield Case("one huge, many tiny", lambda to: _skewed(to, data, whole), given)
    yield Case("a filter keeps few", lambda to: _jsonl(to / "rows.jsonl", whole.texts), {**given, **tenth})
    yield Case("every text twice", lambda to: _jsonl(to / "rows.jsonl", _repeated(whole.texts, 2)), given)
    cut = {"max_bytes": int(megabytes * 2e5), "dedups": []}
    yield Case("max_bytes", lambda to: _jsonl(to / "rows.jsonl", english_first), {**given, **cut})
    yield Case("crawl", lambda to: _copied(to, sorted(data.glob("web/*.warc*.gz"))), given)
    yield _scored(data, work, given)


def _scored(data: Path, work: Path, given: dict[str, Any]) -> Case:
    """Reviews among other text, of which a scorer keeps the reviews."""
    seeds = work / "seeds"
    if not seeds.exists():
        with zipfile.ZipFile(data / "quality/movie_reviews.zip") as pack:
            names = [name for name in sorted(pack.namelist()) if name.endswith(".txt") and "/README" not in name]
            reviews = [pack.read(name).decode("utf8", "replace") for name in names]
        seeds.mkdir()
        _jsonl(seeds / "high.jsonl", reviews[:400])
        _jsonl(seeds / "low.jsonl", [text for _, text in code(data)][:60])
    scorer = {"kind": "hashed_logistic", "high": [str(seeds / "high.jsonl")], "low": [str(seeds / "low.jsonl")]}
    keep = {"kind": "expression", "when": "True", "keep": "quality >= 0.5", "reason": "poor"}
    texts = [text for _, text in english(data)][::2] + [text for _, text in code(data)]
    spec = {**given, "scorers": [scorer], "filters": ["length", keep]}
    return Case("scorer", lambda to: _jsonl(to / "rows.jsonl", _shuffled(texts)), spec)


@cache
def _texts(data: Path, megabytes: float) -> Grown:
    return grown(data, megabytes)


def _shuffled(texts: list[str]) -> list[str]:
    return random.Random(1).sample(texts, len(texts))


def _repeated(texts: list[str], times: int) -> list[str]:
    return _shuffled([text for text in texts[: len(texts) // times] for _ in range(times)])


def _jsonl(path: Path, texts: list[str]) -> None:
    with gzip.open(path, "wt", encoding="utf8") if path.suffix == ".gz" else open(path, "w", encoding="utf8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")


def _parquet(path: Path, texts: list[str]) -> None:
    parquet.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path, row_group_size=2000)


def _files(folder: Path, texts: list[str], ending: str = ".txt") -> None:
    for number, text in enumerate(texts):
        place = folder / f"{number // 500:03d}"
        place.mkdir(exist_ok=True)
        (place / f"{number:06d}{ending}").write_text(text, encoding="utf8")


def _skewed(folder: Path, data: Path, whole: Grown) -> None:
    """Half of the text in one file of rows, and thousands of short notes and source files."""
    _jsonl(folder / "a-large.jsonl", whole.texts[: len(whole.texts) // 2])
    _files(folder, [text[:300] for text in whole.texts[len(whole.texts) // 2 :][:4000]])
    _files(folder / "000", [text for _, text in code(data)], ".py")


def _copied(folder: Path, paths: list[Path]) -> None:
    for path in paths:
        shutil.copyfile(path, folder / path.name)
