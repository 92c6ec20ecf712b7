"""Reading a source: its documents in shards, the counts of what was read and what was not, and what is said of both."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hone.base.durable import sha256
from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.data.annotate import Care, annotate, read_items, tasks
from hone.data.corpus import Corpus
from hone.data.executors.task import Task, need_known
from hone.data.identifiers import LanguageIdentification
from hone.data.identifiers import Opened as Identified
from hone.data.quality.base import Opened, Scorer
from hone.data.settings import Settings
from hone.data.work import Work
from hone.feed.files.listing import File, Listing
from hone.readers.documents import Options

_SAMPLES = 3
"""Documents that could not be read of which each reason shows so many."""


class Models(NamedTuple):
    """The scorers' models: their folder, and (name, hash) of each file in it."""

    folder: Path
    files: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, folder: Path) -> Models:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return cls(folder, tuple((path.relative_to(folder).as_posix(), sha256(path)) for path in paths))


class Reading:
    """The documents of `listing`, scored by models trained on seeds, read by the tasks of `work`."""

    def __init__(self, spec: Settings, listing: Listing, work: Work) -> None:
        self.spec, self.listing, self.work, self.run = spec, listing, work, work.run
        self.num_documents = self.num_bytes = self.num_code = 0
        self.is_full = False
        """Whether it ended at `max_bytes`."""
        self.repaired: Counter[str] = Counter()
        self.set_aside: dict[str, Counter[str]] = {}
        """By reason: 'documents' and 'bytes' that could not be read."""
        self.samples = [{"reason": reason, "source": name, "text": ""} for name, reason in listing.broken]
        self.warnings: list[str] = []
        for _, reason in listing.broken:
            self.set_aside.setdefault(reason, Counter())["documents"] += 1

    def train(self, folder: Path) -> tuple[Models, list[dict[str, Any]]]:
        """Trains the scorers into `folder`; the models, and each scorer's row of stats.json."""
        rows = []
        for technique in self.spec.scorers:
            folder.mkdir(exist_ok=True)
            with self.run.progress(f"train {technique.kind}", None):
                figures = technique.train(folder)  # type: ignore[attr-defined]
            rows.append({"name": technique.kind, "column": technique.column, **figures})  # type: ignore[attr-defined]
        return Models.of(folder), rows

    def corpus(self, models: Models) -> Corpus:
        """Reads all documents, or as many as `max_bytes` allows. Raises SpecError when there are none."""
        corpus = Corpus(self._shards(models))
        self._tell()
        self.warnings = [
            f"{field} '{name}' has a value in none of {self.num_documents} documents: check its spelling"
            for field, name in corpus.without(self.spec.url_field, self.spec.metadata_fields)
        ]
        for warning in self.warnings:
            self.run.warn(warning)
        return corpus

    def row(self) -> dict[str, Any]:
        """The row 'read' of stats.json."""
        reasons = self._reasons()
        return {
            "name": "read",
            "slot": "reader",
            "documents_in": self.num_documents + sum(row["documents"] for row in reasons.values()),
            "bytes_in": self.num_bytes + sum(row["bytes"] for row in reasons.values()),
            "documents_out": self.num_documents,
            "bytes_out": self.num_bytes,
            "reasons": reasons,
            "skipped": dict(sorted(self.listing.skipped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "rows_of_code": self.num_code,
        }

    def shown(self) -> list[dict[str, str]]:
        """Some documents that could not be read, for each reason."""
        seen: Counter[str] = Counter()
        kept = []
        for row in sorted(self.samples, key=lambda row: row["reason"]):
            seen[row["reason"]] += 1
            if seen[row["reason"]] <= _SAMPLES:
                kept.append({"step": "read", **row})
        return kept

    def _shards(self, models: Models) -> list[Path]:
        """Runs the tasks and counts what they say."""
        spec, state = self.spec, self.work.state("read")
        groups = tasks(self.listing.files, spec.options)

        def task(number: int, max_bytes: int | None) -> Task:
            return read_task(
                state,
                number,
                groups[number],
                options=spec.options,
                identifier=spec.identifier,
                languages=spec.languages,
                scorers=spec.scorers,
                models=models,
                max_bytes=max_bytes,
            )

        shards: list[Path] = []
        planned = [task(number, spec.max_bytes) for number in range(len(groups))]
        sizes = [sum(file.size for file in group) for group in groups]
        reads = self.work.map("read", read, planned, sizes=sizes, unit="B", rescue=careful, alone=False)
        with closing(reads) as results:
            for number, summary in enumerate(results):
                if spec.max_bytes is not None and summary["bytes"] > spec.max_bytes - self.num_bytes:
                    results.close()  # `max_bytes` is reached in this task: read it again up to there, and stop
                    planned[number] = task(number, spec.max_bytes - self.num_bytes)
                    summary = next(self.work.pool.map(read, planned[number : number + 1], careful))
                shards.append(state / planned[number].arguments["shard"])
                self._count(summary)
                if self.is_full:
                    self.run.say(f"stopped reading at max_bytes = {spec.max_bytes}")
                    break
        need_known(state, planned)
        return shards

    def _count(self, summary: dict[str, Any]) -> None:
        """Adds what a task says."""
        self.num_documents += summary["rows"]
        self.num_bytes += summary["bytes"]
        self.num_code += summary["code"]
        self.samples += summary["samples"]
        self.listing.skipped.update(summary["skipped"])
        self.repaired.update(summary["repaired"])
        for reason, count in summary["broken"].items():
            self.set_aside.setdefault(reason, Counter()).update(count)
        self.is_full = bool(summary["full"])

    def _reasons(self) -> dict[str, dict[str, int]]:
        """What could not be read, by reason."""
        found = sorted(self.set_aside.items())
        return {reason: {"documents": row["documents"], "bytes": row["bytes"]} for reason, row in found}

    def _tell(self) -> None:
        """Reports what could not be read. Raises SpecError when nothing could."""
        reasons, spec = self._reasons(), self.spec
        found = ", ".join(f"{row['documents']} {reason}" for reason, row in reasons.items())
        num_bad = sum(row["documents"] for row in reasons.values())
        said = []
        if num_bad:
            whole = num_bad + self.num_documents
            said.append(f"set aside {num_bad} of {whole} documents: {found} (see dropped.jsonl)")
        if self.listing.skipped:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.listing.skipped.most_common())
            said.append(f"skipped {self.listing.skipped.total()} files or records of other kinds: {kinds}")
        wrong = "wrong_encoding" in reasons and spec.encoding != "auto"
        if not self.num_documents:
            raise self._nothing(said, wrong)
        if said:
            self.run.say("; ".join(said))
        if wrong:
            count = reasons["wrong_encoding"]["documents"]
            self.run.warn(f"{count} texts are not {spec.encoding}: try --encoding=auto")
        if self.num_code:
            self.run.say(
                f"{self.num_code} of {self.num_documents} documents are rows that look like code: their kind is 'code', "
                "which rules for prose spare"
            )

    def _nothing(self, said: list[str], wrong: bool) -> SpecError:
        """The error of a source without a document; `wrong`: texts had another encoding than the one asked for."""
        spec, listing, fixes = self.spec, self.listing, []
        if self.is_full:
            said.append(f"the first is larger than max_bytes = {spec.max_bytes}")
            fixes.append("raise max_bytes")
        unnamed = next((row for row in self.samples if row["reason"] == "no_text_field"), None)
        if unnamed is not None:
            fixes.append(f"set text_field, which is '{spec.text_field}' now; the first has {unnamed['text'][:120]}")
        if wrong:
            fixes.append(f"set encoding=auto, or the right encoding; it is '{spec.encoding}' now")
        first = f"; the first is {self.samples[0]['source']}: {self.samples[0]['reason']}" if self.samples else ""
        return SpecError(
            f"{spec.source}: {len(listing.files)} files ({human_bytes(listing.num_bytes)}) without a document in them "
            f"({'; '.join(said) or 'nothing'}{first})",
            fix="; ".join(fixes) or "give a source with text in it, or set format when files have the wrong endings",
        )


def read(
    folder: Path,
    *,
    shard: str,
    files: Sequence[File],
    options: Options,
    identifier: LanguageIdentification,
    languages: tuple[str, ...],
    scorers: tuple[Scorer, ...],
    models: Models,
    max_bytes: int | None,
    care: Care | None = None,
) -> dict[str, Any]:
    """Reads `files` into the file `shard` of `folder`, with all columns; returns the summary of `annotate`."""
    return annotate(
        read_items(files, options, care),
        folder / shard,
        identifier=_identifier(identifier, languages),
        scorers=opened(scorers, models),
        max_bytes=max_bytes,
        care=care,
    )


@functools.lru_cache(maxsize=1)
def _identifier(technique: LanguageIdentification, languages: tuple[str, ...]) -> Identified:
    """The identifier, cached: loading its tables takes longer than a small task."""
    return technique.open(languages)


@functools.lru_cache(maxsize=1)
def opened(scorers: tuple[Scorer, ...], models: Models) -> tuple[Opened, ...]:
    """The scorers, opened with their models."""
    return tuple(scorer.open(models.folder) for scorer in scorers)


def read_task(
    state: Path,
    number: int,
    files: Sequence[File],
    *,
    options: Options,
    identifier: LanguageIdentification,
    models: Models,
    languages: tuple[str, ...] = (),
    scorers: tuple[Scorer, ...] = (),
    max_bytes: int | None = None,
) -> Task:
    """The task that reads `files` into shard `number` of `state`."""
    name = f"documents-{number:05d}"
    given = {
        "identifier": identifier,
        "languages": languages,
        "scorers": scorers,
        "models": models,
        "max_bytes": max_bytes,
    }
    arguments = {"shard": f"{name}.parquet", "files": files, "options": options, **given}
    identity = {
        **given,
        "files": [[file.name, file.size, file.part] for file in files],
        "options": repr(options),
        "identifier": [repr(identifier), *map(sha256, identifier.files().values())],
        "scorers": [repr(scorer) for scorer in scorers],
        "models": models.files,
    }
    reads = (*(models.folder / file for file, _ in models.files), *identifier.files().values())
    return Task(name, state, arguments, identity, reads)


def careful(task: Task) -> Task | None:
    """The task to try instead of a reading task that killed its worker: document by document, skipping the one that killed it once known."""
    care = task.arguments.get("care")
    note = task.folder / f".{task.name}.note"
    if care is None:
        note.unlink(missing_ok=True)
        return task.given(care=Care(note))
    line = note.read_text(encoding="utf8") if note.exists() else ""
    if not line or line in care.skip:
        return None
    return task.given(care=Care(note, (*care.skip, line)))
