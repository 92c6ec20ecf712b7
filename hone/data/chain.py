"""Chain: applies filters, deduplications, edits and decontamination to a corpus and records what each step removed and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.durable import sha256, write_jsonl
from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.data.corpus import Corpus, lowest
from hone.data.dedup.groups import Clusters, Found
from hone.data.edits.cuts import Cuts
from hone.data.executors.task import Task
from hone.data.filters.decide import added, causes, decide_shard, filter_row
from hone.data.llm.apply import apply
from hone.data.settings import Settings
from hone.data.work import Work, rounds
from hone.readers.documents import SAMPLE_CHARS

CUT_OUT = "cut_out"
"""The reason under which stats.json counts text cut out of kept documents."""
MUCH_LOST = 0.2
"""Share of a source's documents: when filters drop more, the run says so."""
_FEWEST = 10
"""Sources with fewer documents are counted together."""
_SHOWN = 3
"""Sources, and rules of each, that are named."""


class Dropped(NamedTuple):
    """A sample of what step `step` dropped: document `index`; `like` is its representative, or itself; `elsewhere` one outside of the input."""

    step: str
    reason: str
    index: int
    like: int
    elsewhere: str = ""


class NothingLeft(SpecError):
    """A step dropped all documents that were left."""


class Chain:
    """The steps in the order of the calls: which documents are kept so far, and why the others were dropped.

    `dropped_by` (uint16 [num_documents]) is 0 for a kept document, else 1 + the index in `causes` of the (step, reason) that dropped it.
    `dropped` holds samples of the documents that each step dropped, `pieces` of the spans that were cut, `steps` the rows of stats.json.
    """

    def __init__(self, spec: Settings, corpus: Corpus, work: Work) -> None:
        self.spec, self.corpus, self.work, self.run = spec, corpus, work, work.run
        self.kept = np.ones(len(corpus), bool)
        self.steps: list[dict[str, Any]] = []
        self.dropped: list[Dropped] = []
        self.dropped_by = np.zeros(len(corpus), np.uint16)
        self.causes: list[tuple[str, str]] = []
        self.pieces: list[dict[str, str]] = []
        self.clusters: Clusters | None = None
        self.warnings: list[str] = []

    def filter(self) -> None:
        """Applies every filter to the columns, a shard at a time. Raises SpecError when a filter drops all documents."""
        filters, few = tuple(self.spec.filters), self.spec.num_samples
        if not filters:
            return
        state, parts = self.work.state("filter"), self.corpus.parts()
        lists = [sha256(Path(name).expanduser()) for technique in filters for name in technique.files]
        given = {"filters": filters, "num_samples": few}
        tasks = [Task.of(f"filter-{part.number:05d}", state, {"part": part, **given}, lists) for part in parts]
        totals: list[dict[str, Any]] = []
        samples: list[dict[str, list[tuple[str, int]]]] = [{} for _ in filters]
        for summary, part in zip(self.work.map("filter", decide_shard, tasks), parts):
            self.dropped_by[part.here] = np.load(state / f"filter-{part.number:05d}.npy")
            for best, row in zip(samples, summary["filters"]):
                for reason, found in row.pop("samples").items():
                    here = [(ident, number + part.first) for ident, number in found]
                    best[reason] = sorted([*best.get(reason, []), *here])[:few]
            totals = added(totals, summary["filters"]) if totals else summary["filters"]
        self.causes = [(filters[place].kind, reason) for place, reason in causes(filters)]
        self.kept = self.dropped_by == 0
        for technique, row, best in zip(filters, totals, samples):
            self.steps.append({"name": technique.kind, "slot": "filter", **filter_row(row)})
            reasons = self.steps[-1]["reasons"]
            for reason in sorted(best):
                self.dropped += [Dropped(technique.kind, reason, index, index) for _, index in best[reason]]
            if not row["documents_out"]:
                worst = max(reasons, key=lambda reason: reasons[reason]["documents"])
                self._none_left(technique.label, "filter", row["documents_in"], worst, reasons[worst]["documents"])
            if row["documents_out"] == row["documents_in"]:
                self._warn(f"filter {technique.label} dropped nothing")
        for text in self._losses():
            self._warn(text)

    def _losses(self) -> list[str]:
        """What is said of the sources that filters take much of: how much, by which rules, and the way out."""
        if self.kept.all():
            return []
        names, codes = self.corpus.labels("group")
        few = np.bincount(codes, minlength=len(names)) < _FEWEST
        codes = np.where(few[codes], len(names), codes)
        numbers = np.bincount(codes, minlength=len(names) + 1)
        lost = np.bincount(codes[~self.kept], minlength=len(names) + 1)
        much = np.flatnonzero((lost > MUCH_LOST * numbers) & (numbers >= _FEWEST))
        much = much[np.argsort(-lost[much], kind="stable")]
        said = []
        for place in much[:_SHOWN].tolist():
            counts = np.bincount(self.dropped_by[codes == place], minlength=len(self.causes) + 1)[1:]
            order = [one for one in np.argsort(-counts, kind="stable")[:_SHOWN].tolist() if counts[one]]
            rules = ", ".join(f"{counts[one]} by {': '.join(self.causes[one])}" for one in order)
            name, leave = f"sources of fewer than {_FEWEST} documents", ""
            if place < len(names):
                name, worst = names[place], causes(self.spec.filters)[order[0]][0]
                when = self.spec.filters[worst].when
                leave = f', or spare it: --filters.{worst}.when="({when}) and group != {name!r}"'
            said.append(
                f"filters drop {lost[place]} of {numbers[place]} documents of {name} ({lost[place] / numbers[place]:.0%}), {rules}; "
                f"dropped.jsonl has samples, `hone redecide` tries other limits{leave}"
            )
        if len(much) > _SHOWN:
            said.append(
                f"filters drop more than {MUCH_LOST:.0%} of {len(much) - _SHOWN} other sources: see groups in stats.json"
            )
        return said

    def deduplicate(self) -> None:
        """Applies every deduplication."""
        if self.spec.dedups:
            self.clusters = Clusters(self.kept)
        for number, technique in enumerate(self.spec.dedups):
            state = self._prepared(technique, f"dedup-{number}")
            found = technique.compare(self.corpus, self.kept, state)
            self.corpus.columns.forget("text_hash")
            self.clusters.join(found)
            before = self.kept
            self.kept = found.kept(before)
            sizes = self.corpus.columns["bytes"]
            row = step_row(technique.kind, "dedup", sizes, before, self.kept, technique.reason)
            before = self._drop_known(technique, found, before, row)
            self.steps.append({**row, "figures": found.figures} if found.figures else row)
            self._settle(technique, "dedup", before, found.stands)
            if row["documents_in"] == row["documents_out"]:
                self._warn(f"dedup '{technique.kind}' dropped nothing")

    def _drop_known(self, technique: Any, found: Found, before: np.ndarray, row: dict[str, Any]) -> np.ndarray:
        """Counts in `row` and records the documents that an earlier artifact has, for a reason of their own; returns `before` without them."""
        if not found.earlier:
            return before
        reason = f"{technique.reason}_of_earlier"
        known = before & found.known()
        sizes = self.corpus.columns["bytes"]
        whole = step_row(technique.kind, "dedup", sizes, before, before & ~known, reason)
        rest = step_row(technique.kind, "dedup", sizes, before & ~known, self.kept, technique.reason)
        row["reasons"] = whole["reasons"] | rest["reasons"]
        gone = np.flatnonzero(known)
        self.causes.append((technique.kind, reason))
        self.dropped_by[gone] = len(self.causes)
        for index in lowest(self.corpus.columns["id"], gone, self.spec.num_samples).tolist():
            like = found.earlier[int(found.stands[index])]
            self.dropped.append(Dropped(technique.kind, reason, index, index, f"earlier document {like}"))
        return before & ~known

    def annotate(self) -> None:
        """Asks language models about the documents left; `corpus` then has the answers."""
        for number, technique in enumerate(self.spec.annotations):
            state = self.work.state(f"annotation-{number}")
            sizes, before = self.corpus.columns["bytes"], self.kept
            # Among the logs, which stay when an input has changed: what is paid is not asked again.
            journal = self.work.place.log / f"answers-{technique.kind}-{number}.jsonl"
            with self.run.progress(technique.kind, int(before.sum())) as bar:
                made = apply(technique, self.corpus, before, state, journal, bar.advance)
            self.corpus, self.kept = made.corpus, made.kept
            left = self.corpus.columns["bytes"]
            row = step_row(technique.kind, "annotation", sizes, before, self.kept, technique.reason)
            self.steps.append({**row, "bytes_out": int(left[self.kept].sum()), "figures": made.figures})
            found = made.figures
            cost = f", cost {found['cost']:.4g}" if found["cost"] else ""
            self.run.say(
                f"annotation '{technique.kind}': {found['asked']} documents, {found['failed']} without a usable answer; "
                f"{found['answers']} answers ({found['answers_from_before']} from before), {found['tokens_in']} tokens sent, "
                f"{found['tokens_out']} received{cost}"
            )
            self._settle(technique, "annotation", before)

    def edit(self) -> None:
        """Cuts spans out of documents and drops documents of which nothing is left."""
        for number, technique in enumerate(self.spec.edits):
            state = self._prepared(technique, f"edit-{number}")
            cuts = technique.cuts(self.corpus, self.kept, state)
            nobody = np.zeros(len(self.corpus), bool)
            self._cut(technique, "edit", nobody, cuts, technique.figures(self.corpus, cuts, state))

    def decontaminate(self) -> None:
        """Removes text of evaluation sets; contamination.jsonl lists the examples that were found, and in which documents."""
        rows = []
        for number, technique in enumerate(self.spec.decontaminations):
            state = self._prepared(technique, f"decontamination-{number}")
            found = technique.contaminated(self.corpus, self.kept, state)
            for warning in found.warnings:
                self._warn(f"decontamination '{technique.kind}': {warning}")
            self._cut(technique, "decontamination", found.dropped, found.cuts, found.figures)
            rows += [{"step": technique.kind, **row} for row in found.examples]
        if self.spec.decontaminations:
            write_jsonl(self.work.folder / "contamination.jsonl", rows)

    def drop(
        self, name: str, slot: str, reasons: np.ndarray, whys: Sequence[tuple[int, str, str]], figures: dict[str, Any]
    ) -> None:
        """Drops the kept documents that have a reason in `reasons` (str [num_documents], '' for none), some of which `whys` explain:
        (document, reason, why). Raises SpecError when none is left."""
        before, sizes = self.kept, self.corpus.columns["bytes"]
        gone = before & (reasons != "")
        self.kept = before & ~gone
        row = step_row(name, slot, sizes, before, self.kept, "")
        row["reasons"] = {}
        for reason in sorted(set(reasons[gone])):
            here = gone & (reasons == reason)
            row["reasons"][reason] = {"documents": int(here.sum()), "bytes": int(sizes[here].sum())}
            self.causes.append((name, reason))
            self.dropped_by[here] = len(self.causes)
        self.steps.append({**row, "figures": figures})
        sources = self.corpus.at("source", [index for index, *_ in whys])
        self.pieces += [
            {"step": name, "reason": reason, "source": sources[index], "text": why} for index, reason, why in whys
        ]
        said = ", ".join(f"{count['documents']} {reason}" for reason, count in row["reasons"].items())
        first = f"; the first: {sources[whys[0][0]]}: {whys[0][2]}" if whys else ""
        if not self.kept.any():
            raise NothingLeft(
                f"none of {int(before.sum())} {name} can be trained on: {said}{first}",
                fix="correct the rows, or choose another tokenizer.chat.template, train_on or max_tokens",
            )
        if said:
            self._warn(f"{name} left out: {said} (see dropped.jsonl){first}")

    def _prepared(self, technique: Technique, name: str) -> Path:
        """The state folder of a technique, after the tasks of all its rounds."""
        state = self.work.state(name)
        for function, tasks in rounds(technique, self.corpus, self.kept, state):
            for _ in self.work.map(technique.kind, function, tasks, alone=False):
                pass
        return state

    def _cut(
        self, technique: Any, slot: str, dropped: np.ndarray, cuts: Sequence[Cuts], counts: dict[str, Any]
    ) -> None:
        """Applies `cuts`; drops the documents in `dropped` and those of which nothing is left."""
        name, before = technique.kind, self.kept
        self.pieces += self._samples(technique, cuts)
        sizes = self.corpus.columns["bytes"]
        self.corpus.cut(cuts)
        left = self.corpus.columns["bytes"]
        self.kept = before & ~(dropped | (left == 0))
        row = step_row(name, slot, sizes, before, self.kept, technique.reason, left)
        self.steps.append({**row, "figures": counts})
        self._settle(technique, slot, before)
        if self.kept.sum() == before.sum() and not any(len(one.document) for one in cuts):
            self._warn(f"{slot} '{name}' cut nothing" if slot == "edit" else f"{slot} '{name}' found nothing")

    def _samples(self, technique: Any, cuts: Sequence[Cuts]) -> list[dict[str, str]]:
        """The first span cut out of each of a few documents, those with the lowest ids; of what must not be shown, what is written
        in its place."""
        touched = np.unique(np.concatenate([np.empty(0, np.int64), *(one.document for one in cuts)]))
        rows = []
        few = lowest(self.corpus.columns["id"], touched, self.spec.num_samples)
        sources = self.corpus.at("source", few.tolist())
        chosen = np.zeros(len(self.corpus), bool)
        chosen[few] = True
        for (_, shard, first, end), one in zip(self.corpus.spans(), cuts):
            for indices, texts in self.corpus.batches(shard, first, chosen) if chosen[first:end].any() else ():
                for place, index in enumerate(indices):
                    at = int(np.searchsorted(one.document, index))
                    begin = texts.offsets[place]
                    piece = texts.data[begin + one.start[at] : begin + one.end[at]].tobytes()
                    if not getattr(technique, "discloses", True):
                        piece = one.fill[at]
                    text = piece.decode("utf8", "replace")[:SAMPLE_CHARS]
                    source = sources[int(index)]
                    rows.append({"step": technique.kind, "reason": CUT_OUT, "source": source, "text": text})
        return rows

    def _settle(self, technique: Any, slot: str, before: np.ndarray, stands: np.ndarray | None = None) -> None:
        """Records samples of dropped documents; `stands` (int [n]) is the document that each is a copy of. Raises SpecError when none is left."""
        gone = np.flatnonzero(before & ~self.kept)
        self.causes.append((technique.kind, technique.reason))
        self.dropped_by[gone] = len(self.causes)
        few = lowest(self.corpus.columns["id"], gone, self.spec.num_samples).tolist()
        self.dropped += [
            Dropped(technique.kind, technique.reason, index, index if stands is None else int(stands[index]))
            for index in few
        ]
        if not self.kept.any():
            self._none_left(f"'{technique.kind}'", slot, int(before.sum()), technique.reason, len(gone))

    def _none_left(self, name: str, slot: str, num_before: int, reason: str, num_gone: int) -> None:
        raise NothingLeft(
            f"{slot} {name} dropped all {num_before} documents, {num_gone} of them for '{reason}'",
            fix=f"loosen or remove {slot} {name}, or give another source",
        )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.run.warn(text)


def step_row(
    name: str,
    slot: str,
    sizes: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    reason: str,
    left: np.ndarray | None = None,
) -> dict[str, Any]:
    """A row of stats.json for a step that drops for one reason. `sizes` bytes, `before` and `after` bool, all [num_documents].

    `left` are the bytes after a step that cuts; bytes cut out of kept documents are counted as CUT_OUT.
    """
    left = sizes if left is None else left
    gone = before & ~after
    num_gone = int(gone.sum())
    row = {
        "name": name,
        "slot": slot,
        "documents_in": int(before.sum()),
        "bytes_in": int(sizes[before].sum()),
        "documents_out": int(after.sum()),
        "bytes_out": int(left[after].sum()),
        "reasons": {reason: {"documents": num_gone, "bytes": int(sizes[gone].sum())}} if num_gone else {},
    }
    cut = int((sizes - left)[after].sum())
    if cut:
        row["reasons"][CUT_OUT] = {"documents": 0, "bytes": cut}
    return row
