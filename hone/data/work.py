"""Work: one run of the data stage: where its steps write, who does their tasks, and the seconds that each step takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.base.table import Technique
from hone.data.corpus import Corpus, Part
from hone.data.executors.base import Pool, Rescue
from hone.data.executors.task import Function, Task, need_known


class Place(Protocol):
    """The folders of an artifact that is being made; `base.artifact.Draft` is one."""

    folder: Path

    @property
    def state(self) -> Path: ...

    @property
    def log(self) -> Path: ...

    def keep_time(self) -> None: ...


class Work:
    """What all steps of a run share: the folders of `place`, progress and messages of `run`, the `pool` that does tasks."""

    def __init__(self, place: Place, run: Run, pool: Pool) -> None:
        self.place, self.run, self.pool = place, run, pool
        self._begun = time.monotonic()

    @property
    def folder(self) -> Path:
        """The folder of the result."""
        return self.place.folder

    def state(self, name: str) -> Path:
        """The folder for the tasks of step `name`, from which a resumed run goes on."""
        path = self.place.state / name.replace("/", "-")
        path.mkdir(exist_ok=True)
        return path

    def map(
        self,
        label: str,
        function: Function,
        tasks: Sequence[Task],
        *,
        sizes: Sequence[float] | None = None,
        unit: str = "",
        rescue: Rescue | None = None,
        alone: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """The summaries of `tasks` in their order; a progress bar counts tasks, or their `sizes` in `unit`.

        With `alone` nothing else writes into their folder. Raises ArtifactError at the end for files there that none of them wrote.
        """
        steps = [1.0] * len(tasks) if sizes is None else sizes
        summaries = self.pool.map(function, tasks, rescue)
        with self.run.progress(label, sum(steps), unit) as bar, closing(summaries):
            for summary, size in zip(summaries, steps):
                yield summary
                bar.advance(size)
                self.place.keep_time()
        if alone and tasks:
            need_known(tasks[0].folder, tasks)

    def write(self, name: str, function: Function, tasks: Sequence[Task], ending: str = ".parquet") -> None:
        """Runs `tasks` of state folder `name`, each of which makes one file, and moves these into folder `name` of the result."""
        state, folder = self.state(name), self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        left = [task for task in tasks if not (folder / f"{task.name}{ending}").exists()]  # moved before a kill
        for _, task in zip(self.map(f"write {name}", function, left, alone=False), left):
            os.replace(state / f"{task.name}{ending}", folder / f"{task.name}{ending}")
        need_known(state, tasks)

    def done(self, step: str) -> None:
        """Adds the seconds since the last call to those of `step` in log/seconds.json, where killed runs have left theirs."""
        now, path = time.monotonic(), self.place.log / "seconds.json"
        seconds = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
        seconds[step] = seconds.get(step, 0.0) + now - self._begun
        write_atomic(path, json.dumps(seconds, indent=1).encode())
        self._begun = now
        self.place.keep_time()


def rounds(
    technique: Technique, corpus: Corpus, kept: np.ndarray, state: Path
) -> Iterator[tuple[Function, list[Task]]]:
    """(function, tasks) of what `technique` reads before it decides; a round needs the results of those before it.

    First `technique.prepare(corpus, chosen, state)` on each shard, where it has that method, for the kept documents
    or those that it `takes_part` in; then those of `technique.rounds(corpus, kept, state)`, where it compares documents of all shards.
    """
    if hasattr(technique, "prepare"):
        chosen, tasks = technique.takes_part(corpus, kept) if hasattr(technique, "takes_part") else kept, []
        for part in corpus.parts():
            given = {"technique": technique, "part": part, "chosen": chosen[part.here]}
            tasks.append(Task.of(f"shard-{part.number:05d}", state, given))
        yield prepare, tasks
    if hasattr(technique, "rounds"):
        yield from technique.rounds(corpus, kept, state)


def prepare(folder: Path, technique: Any, part: Part, chosen: np.ndarray) -> dict[str, Any]:
    """A task: runs `technique.prepare` on one shard, for the documents in `chosen` (bool, the shard's documents)."""
    technique.prepare(Corpus.of(part), part.everyone(chosen), folder)
    return {"rows": int(chosen.sum())}
