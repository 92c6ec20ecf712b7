"""Work: the data stage's tasks and the functions that they run, here or in another process."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hone.base.durable import sha256
from hone.base.run import Run
from hone.base.table import Technique
from hone.data.annotate import Care, Opened, annotate
from hone.data.corpus import Corpus, Part, digest
from hone.data.dedup.groups import Named
from hone.data.executors.task import Function, Task
from hone.data.filters import decide as deciding
from hone.data.filters.base import Filter
from hone.data.identifiers import LanguageIdentification
from hone.data.identifiers import Opened as Identified
from hone.data.settings import Settings
from hone.data.tokens.pack import encode_shards
from hone.data.tokens.tokenizer import FILES, OPTIONAL_FILES, Encoder, load
from hone.feed.files.listing import File
from hone.readers.documents import Options


class Scorer(Protocol):
    """The interface of a scorer for annotation: it opens its model in the process of the task. Hashable."""

    def open(self, folder: Path) -> Opened: ...


class Models(NamedTuple):
    """The scorers' models: their folder, and (name, hash) of each file in it."""

    folder: Path
    files: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, folder: Path) -> Models:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return cls(folder, tuple((path.relative_to(folder).as_posix(), sha256(path)) for path in paths))


def train_scorers(spec: Settings, folder: Path, run: Run) -> tuple[Models, list[dict[str, Any]]]:
    """Trains the scorers into `folder`; returns the models, and each scorer's row of stats.json."""
    rows = []
    for technique in spec.scorers:
        folder.mkdir(exist_ok=True)
        with run.progress(f"train {technique.kind}", None):
            figures = technique.train(folder)
        rows.append({"name": technique.kind, "column": technique.column, **figures})
    return Models.of(folder), rows


def decide(folder: Path, part: Part, filters: Sequence[Filter], num_samples: int) -> dict[str, Any]:
    """Writes what dropped each document of a shard to a file; `filters` of the summary are the rows of filters/decide.py."""
    with_text = any("text" in technique.columns for technique in filters)
    dropped_by, rows = deciding.decide(filters, Corpus.of(part).held(part.shard, with_text), num_samples)
    np.save(folder / decided_path(part), dropped_by)
    return {"rows": len(dropped_by), "filters": rows}


def decided_path(part: Part) -> str:
    """The file that `decide` writes."""
    return f"filter-{part.number:05d}.npy"


def decide_tasks(corpus: Corpus, filters: Sequence[Filter], num_samples: int, state: Path) -> list[Task]:
    """The tasks of filtering each shard."""
    said = [technique.model_dump(mode="json") for technique in filters]
    said += [sha256(Path(name).expanduser()) for technique in filters for name in technique.files]
    return [
        Task(
            f"filter-{part.number:05d}",
            state,
            {"part": part, "filters": tuple(filters), "num_samples": num_samples},
            [said, num_samples, part.identity()],
        )
        for part in corpus.parts()
    ]


class Preparing(Protocol):
    """Optional methods of a technique that reads texts shard by shard first, so that shards can be processed by any worker."""

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        """Which of the kept documents (bool [num_documents]) it reads."""
        ...

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Writes its results for each shard of `corpus` to `state`, to be read later. `corpus` may be some of the shards."""
        ...


class Comparing(Protocol):
    """Optional method of a technique that compares documents of all shards: tasks that read the results of earlier tasks."""

    def rounds(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Iterator[tuple[Function, list[Task]]]:
        """(function, tasks) of each round, requested when the rounds before are done; their results are in `state`."""
        ...


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
        files,
        folder / shard,
        options=options,
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
    identity = {
        "files": [[file.name, file.size, file.part] for file in files],
        "options": repr(options),
        "identifier": [repr(identifier), *map(sha256, identifier.files().values())],
        "languages": languages,
        "scorers": [repr(scorer) for scorer in scorers],
        "models": models.files,
        "max_bytes": max_bytes,
    }
    reads = (*(models.folder / file for file, _ in models.files), *identifier.files().values())
    arguments = {
        "shard": f"{name}.parquet",
        "files": files,
        "options": options,
        "identifier": identifier,
        "languages": languages,
        "scorers": scorers,
        "models": models,
        "max_bytes": max_bytes,
    }
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


def prepare(folder: Path, technique: Preparing, part: Part, chosen: np.ndarray) -> dict[str, Any]:
    """Runs `technique.prepare` on one shard, for the documents in `chosen` (bool, the shard's documents)."""
    technique.prepare(Corpus.of(part), _by_document(part, chosen), folder)
    return {"rows": int(chosen.sum())}


def _by_document(part: Part, here: np.ndarray) -> np.ndarray:
    """`here` (bool, the shard's documents) at their indices in the whole corpus, up to the shard's end."""
    everyone = np.zeros(part.here.stop, bool)  # untouched pages take no memory
    everyone[part.here] = here
    return everyone


def prepare_tasks(technique: Technique, corpus: Corpus, kept: np.ndarray, state: Path) -> list[Task]:
    """The tasks that run `technique.prepare` on each shard; none when it has no such method."""
    if not hasattr(technique, "prepare"):
        return []
    chosen = technique.takes_part(corpus, kept)
    return [
        Task(
            f"shard-{part.number:05d}",
            state,
            {"technique": technique, "part": part, "chosen": chosen[part.here]},
            [technique.model_dump(mode="json"), part.identity(), digest(chosen[part.here])],
        )
        for part in corpus.parts()
    ]


def rounds(
    technique: Technique, corpus: Corpus, kept: np.ndarray, state: Path
) -> Iterator[tuple[Function, list[Task]]]:
    """(function, tasks) of all rounds before `technique` decides; a round needs the results of those before it."""
    yield prepare, prepare_tasks(technique, corpus, kept, state)
    if hasattr(technique, "rounds"):
        yield from technique.rounds(corpus, kept, state)


def encode(folder: Path, part: Part, chosen: dict[str, np.ndarray], tokenizer: Path, which: str) -> dict[str, Any]:
    """Writes the tokens of one shard; `chosen` (bool, the shard's documents) are those of each split. `which` is the tokenizer's hash."""
    splits = {split: _by_document(part, here) for split, here in chosen.items()}
    encode_shards(Corpus.of(part), splits, _encoder(tokenizer, which), folder)
    return {"rows": int(sum(here.sum() for here in chosen.values()))}


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, which: str) -> Encoder:
    """The tokenizer, cached: loading it takes longer than a small task."""
    return load(folder)


def encode_tasks(corpus: Corpus, splits: dict[str, np.ndarray], tokenizer: Path, state: Path) -> list[Task]:
    """The tasks of tokenizing each shard with the tokenizer in folder `tokenizer`."""
    made = []
    which = sha256(tokenizer / FILES[0])
    reads = tuple(tokenizer / name for name in (*FILES, *OPTIONAL_FILES))
    for part in corpus.parts():
        chosen = {split: members[part.here] for split, members in splits.items()}
        identity = [which, part.identity(), [[split, digest(here)] for split, here in chosen.items()]]
        arguments = {"part": part, "chosen": chosen, "tokenizer": tokenizer, "which": which}
        made.append(Task(f"tokens-{part.number:05d}", state, arguments, identity, reads))
    return made


def write_tasks(corpus: Corpus, splits: dict[str, np.ndarray], clusters: Named | None, state: Path) -> list[Task]:
    """The tasks of `write_kept` for each shard that has kept documents; `clusters` are those of the whole corpus."""
    made = []
    for part in corpus.parts():
        chosen = {split: members[part.here] for split, members in splits.items()}
        if any(here.any() for here in chosen.values()):
            near = clusters and clusters.at(part.here)
            identity = [part.identity(), [[split, digest(here)] for split, here in chosen.items()]]
            arguments = {"part": part, "splits": chosen, "clusters": near}
            made.append(Task(f"{part.number:05d}", state, arguments, [*identity, near and digest(*near)]))
    return made


def column_tasks(
    corpus: Corpus, dropped_by: np.ndarray, causes: Sequence[tuple[str, str]], clusters: Named | None, state: Path
) -> list[Task]:
    """The tasks of `write_signals` for each shard that has documents; `dropped_by` (uint16) is that of the whole corpus."""
    made = []
    for part in corpus.parts():
        if part.rows:
            here, near = dropped_by[part.here], clusters and clusters.at(part.here)
            identity = [part.identity(), digest(here), causes, near and digest(*near)]
            arguments = {"part": part, "dropped_by": here, "causes": tuple(causes), "clusters": near}
            made.append(Task(f"{part.number:05d}", state, arguments, identity))
    return made
