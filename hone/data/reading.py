"""Reading a source: its documents in shards, the counts of what was read and what was not, and what is said of both."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from hone.base.artifact import Draft
from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.base.run import Run
from hone.data.annotate import tasks
from hone.data.corpus import Corpus
from hone.data.executors.base import Pool
from hone.data.executors.task import Task, need_known
from hone.data.settings import Settings
from hone.data.work import Models, careful, read, read_task
from hone.feed.files.listing import Listing

_SAMPLES = 3
"""Documents that could not be read of which each reason shows so many."""


class Reading:
    """The documents of `listing`, read by tasks of a pool into `draft.state`."""

    def __init__(self, spec: Settings, listing: Listing, draft: Draft, run: Run) -> None:
        self.spec, self.listing, self.draft, self.run = spec, listing, draft, run
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

    def corpus(self, models: Models, pool: Pool) -> Corpus:
        """Reads all documents, or as many as `max_bytes` allows. Raises SpecError when there are none."""
        shards = self._shards(models, pool)
        self._tell()
        corpus = Corpus(shards)
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

    def _shards(self, models: Models, pool: Pool) -> list[Path]:
        """Runs the tasks and counts what they say."""
        spec, state = self.spec, self.draft.state / "read"
        state.mkdir(exist_ok=True)
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
        with (
            self.run.progress("read", self.listing.num_bytes, "B") as bar,
            closing(pool.map(read, planned, careful)) as results,
        ):
            for number, summary in enumerate(results):
                if spec.max_bytes is not None and summary["bytes"] > spec.max_bytes - self.num_bytes:
                    results.close()  # `max_bytes` is reached in this task: read it again up to there, and stop
                    planned[number] = task(number, spec.max_bytes - self.num_bytes)
                    summary = next(pool.map(read, planned[number : number + 1], careful))
                shards.append(state / planned[number].arguments["shard"])
                bar.advance(sum(file.size for file in groups[number]))
                self.draft.keep_time()
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
