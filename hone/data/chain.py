"""Chain: filters, deduplications, edits and decontamination over one corpus, each step with what it took away and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.artifact import Draft
from hone.base.durable import write_jsonl
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts, figures
from hone.data.executors.base import Pool
from hone.data.expression import evaluate
from hone.data.readers.documents import SAMPLE_CHARS
from hone.data.results import CUT_OUT, step_row
from hone.data.settings import Settings
from hone.data.work import prepare, prepare_tasks


class Chain:
    """The steps in the order in which they are called: who is still alive, why the others are not.

    `drops` holds (step, reasons object [n]) per step, `likes` (int [n]) which document stands for each, `pieces` samples
    of what was cut out, `steps` the rows of stats.json.
    """

    def __init__(self, spec: Settings, corpus: Corpus, run: Run, pool: Pool) -> None:
        self.spec, self.corpus, self.run, self.pool = spec, corpus, run, pool
        self.alive = np.ones(len(corpus), bool)
        self.likes = np.arange(len(corpus))
        self.steps: list[dict[str, Any]] = []
        self.drops: list[tuple[str, np.ndarray]] = []
        self.pieces: list[dict[str, str]] = []
        self.warnings: list[str] = []

    def filter(self) -> None:
        """Applies every filter to the columns. Raises SpecError when one leaves nothing."""
        columns = self.corpus.columns
        fails = np.zeros(len(self.corpus), np.uint16)
        for technique in self.spec.filters:
            for _, failed in _failures(technique, columns):
                fails += failed
        for technique in self.spec.filters:
            sizes = columns["bytes"]
            rules = [
                {
                    "reason": rule.reason,
                    "keep": rule.keep,
                    "alone": _count(failed, sizes),
                    "marginal": _count(failed & (fails == 1), sizes),
                }
                for rule, failed in _failures(technique, columns)
            ]
            _, reasons = technique.decide(columns)
            self._drop(technique.kind, "filter", reasons, alone=_count(reasons != "", sizes), rules=rules)

    def deduplicate(self, draft: Draft) -> None:
        """Applies every deduplication."""
        for number, technique in enumerate(self.spec.dedups):
            state = self._prepared(technique, draft, f"dedup-{number}")
            stands = technique.representatives(self.corpus, self.alive, state)
            gone = self.alive & (stands != np.arange(len(stands)))
            self.likes[gone] = stands[gone]
            self._drop(technique.kind, "dedup", np.where(gone, technique.reason, "").astype(object))

    def edit(self, draft: Draft) -> None:
        """Cuts parts out of documents; whoever has nothing left goes."""
        for number, technique in enumerate(self.spec.edits):
            state = self._prepared(technique, draft, f"edit-{number}")
            cuts = technique.cuts(self.corpus, self.alive, state)
            nobody = np.zeros(len(self.corpus), bool)
            self._cut(technique, "edit", nobody, cuts, figures(cuts))

    def decontaminate(self, draft: Draft) -> None:
        """Takes out what evaluation sets hold; contamination.jsonl tells which of their examples were found, and where."""
        rows = []
        for number, technique in enumerate(self.spec.decontaminations):
            state = self._prepared(technique, draft, f"decontamination-{number}")
            found = technique.contaminated(self.corpus, self.alive, state)
            for warning in found.warnings:
                self._warn(f"decontamination '{technique.kind}': {warning}")
            self._cut(technique, "decontamination", found.dropped, found.cuts, found.figures)
            rows += [{"step": technique.kind, **row} for row in found.examples]
        if self.spec.decontaminations:
            write_jsonl(draft.folder / "contamination.jsonl", rows)

    def _prepared(self, technique: Technique, draft: Draft, name: str) -> Path:
        """The state folder of a technique, with what it wants to know of each shard already in it."""
        state = draft.state / name
        state.mkdir(exist_ok=True)
        tasks = prepare_tasks(technique, self.corpus, self.alive, state)
        with self.run.progress(technique.kind, len(tasks)) as bar:
            for _ in self.pool.map(prepare, tasks):
                bar.advance()
                draft.keep_time()
        return state

    def _drop(self, name: str, slot: str, reasons: np.ndarray, **more: Any) -> None:
        before = self.alive
        self.alive = before & (reasons == "")
        sizes = self.corpus.columns["bytes"]
        self.steps.append({**step_row(name, slot, sizes, before, self.alive, reasons), **more})
        self._settle(name, slot, before, reasons)
        if self.alive.sum() == before.sum():
            self._warn(f"{slot} '{name}' dropped nothing")

    def _cut(
        self, technique: Any, slot: str, dropped: np.ndarray, cuts: Sequence[Cuts], counts: dict[str, Any]
    ) -> None:
        """Leaves `cuts` out and drops the documents in `dropped` and those that have nothing left."""
        name, before = technique.kind, self.alive
        self.pieces += self._samples(name, cuts)
        sizes = self.corpus.columns["bytes"]
        self.corpus.cut(cuts)
        left = self.corpus.columns["bytes"]
        reasons = np.where(before & (dropped | (left == 0)), technique.reason, "").astype(object)
        self.alive = before & (reasons == "")
        self.steps.append({**step_row(name, slot, sizes, before, self.alive, reasons, left), "figures": counts})
        self._settle(name, slot, before, reasons)
        if self.alive.sum() == before.sum() and not any(len(one.document) for one in cuts):
            self._warn(f"{slot} '{name}' cut nothing" if slot == "edit" else f"{slot} '{name}' found nothing")

    def _samples(self, name: str, cuts: Sequence[Cuts]) -> list[dict[str, str]]:
        """The first piece cut out of each of a few documents, those with the lowest ids."""
        touched = np.unique(np.concatenate([np.empty(0, np.int64), *(one.document for one in cuts)]))
        ids, rows = self.corpus.columns["id"], []
        few = touched[np.argsort(ids[touched], kind="stable")][: self.spec.num_samples]
        chosen = np.zeros(len(self.corpus), bool)
        chosen[few] = True
        for (_, shard, first, end), one in zip(self.corpus.spans(), cuts):
            for indices, texts in self.corpus.batches(shard, first, chosen) if chosen[first:end].any() else ():
                for place, index in enumerate(indices):
                    at = int(np.searchsorted(one.document, index))
                    begin = texts.offsets[place]
                    piece = bytes(texts.data[begin + one.start[at] : begin + one.end[at]]).decode("utf8", "replace")
                    source = str(self.corpus.columns["source"][index])
                    rows.append({"step": name, "reason": CUT_OUT, "source": source, "text": piece[:SAMPLE_CHARS]})
        return rows

    def _settle(self, name: str, slot: str, before: np.ndarray, reasons: np.ndarray) -> None:
        """Notes who was dropped. Raises SpecError when nobody is left."""
        self.drops.append((name, np.where(before, reasons, "")))
        if not self.alive.any():
            worst = Counter(reasons[before]).most_common(1)[0]
            raise SpecError(
                f"{slot} '{name}' dropped all {before.sum()} documents that reached it, {worst[1]} of them for '{worst[0]}'",
                fix=f"loosen or remove {slot} '{name}', or give it other text",
            )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.run.say(f"note: {text}")


def _failures(technique: Any, columns: Any) -> Any:
    """(rule, bool [n] of the documents that do not meet it) of a filter, each rule as if it stood alone."""
    applies = evaluate(technique.when, columns)
    for rule in technique.rules():
        yield rule, applies & ~evaluate(rule.keep, columns)


def _count(chosen: np.ndarray, sizes: np.ndarray) -> dict[str, int]:
    return {"documents": int(chosen.sum()), "bytes": int(sizes[chosen].sum())}
