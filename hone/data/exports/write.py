"""Write exports: the tasks of every requested form, a file a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import write_atomic
from hone.base.lazy import lazy
from hone.data.chain import Chain
from hone.data.corpus import Corpus, Part, digest
from hone.data.dedup.groups import Named
from hone.data.executors.task import Function, Task
from hone.data.exports.hugging_face import SPLITS, card, write_split
from hone.data.exports.rows import dropped_lines, kept_lines
from hone.data.exports.spec import Exports

parquet = lazy("pyarrow.parquet")
LINES = ("jsonl", "dropped")
"""Folders of JSON lines; the others hold Parquet."""
Write = Callable[[str, Function, Callable[[Path], list[Task]]], None]
"""`write(name, function, plan)` runs the tasks that `plan` makes for a state folder and moves their files into folder `name`."""


def export(
    spec: Exports, corpus: Corpus, splits: Mapping[str, np.ndarray], chain: Chain, folder: Path, write: Write
) -> None:
    """Writes the requested forms into `folder`, whose documents/ is complete."""
    documents = sorted((folder / "documents").glob("*.parquet"))
    if spec.jsonl:
        write("jsonl", kept_lines, lambda state: [_line_task(path, state) for path in documents])
    if spec.hugging_face:
        by_split = {
            split: [path for path, part in _by_path(corpus, documents).items() if members[_span(corpus, part)].any()]
            for split, members in splits.items()
        }
        write(
            "hugging_face/data",
            write_split,
            lambda state: [_split_task(path, split, state) for split, paths in by_split.items() for path in paths],
        )
        _write_card(corpus, by_split, chain, folder)
    if spec.dropped:
        clusters = chain.clusters and chain.clusters.named(corpus.columns["id"])
        write("dropped", dropped_lines, lambda state: _dropped_tasks(corpus, chain, clusters, state))


def _line_task(path: Path, state: Path) -> Task:
    name = f"{path.stem}.jsonl.zst"
    return Task(path.stem, state, {"documents": path, "name": name}, [path.name, path.stat().st_size])


def _split_task(path: Path, split: str, state: Path) -> Task:
    name = f"{SPLITS[split]}-{path.stem}"
    return Task(
        name,
        state,
        {"documents": path, "split": split, "name": f"{name}.parquet"},
        [path.name, path.stat().st_size, split],
    )


def _dropped_tasks(corpus: Corpus, chain: Chain, clusters: Named | None, state: Path) -> list[Task]:
    made = []
    for part in corpus.parts():
        span = _span(corpus, part)
        gone = chain.dropped_by[span]
        if gone.any():
            near = clusters and Named(clusters.ids[span], clusters.sizes[span])
            filters = tuple(chain.spec.filters)
            said = [technique.model_dump(mode="json") for technique in filters]
            identity = [part.identity(), digest(gone), chain.causes, said, near and digest(*near)]
            bare = Part(
                part.number, part.shard, part.first, Corpus([part.shard]).cuts[0]
            )  # the texts as they were read
            arguments = {
                "part": bare,
                "dropped_by": gone,
                "causes": tuple(chain.causes),
                "filters": filters,
                "clusters": near,
            }
            made.append(Task(f"{part.number:05d}", state, arguments, identity))
    return made


def _span(corpus: Corpus, part: Part) -> slice:
    """The documents of a part."""
    return slice(part.first, part.first + corpus.sizes[part.number])


def _by_path(corpus: Corpus, documents: list[Path]) -> dict[Path, Part]:
    """The part of each file of kept documents."""
    parts = {f"{part.number:05d}": part for part in corpus.parts()}
    return {path: parts[path.stem] for path in documents}


def _write_card(corpus: Corpus, by_split: Mapping[str, list[Path]], chain: Chain, folder: Path) -> None:
    home = folder / "hugging_face"
    counts: dict[str, tuple[int, int]] = {}
    schema: Any = None
    for split, paths in by_split.items():
        metadata = [parquet.read_metadata(home / "data" / f"{SPLITS[split]}-{path.stem}.parquet") for path in paths]
        if metadata:
            sizes = sum(one.row_group(group).total_byte_size for one in metadata for group in range(one.num_row_groups))
            counts[split] = (sum(one.num_rows for one in metadata), sizes)
            schema = metadata[0].schema.to_arrow_schema()
    names, codes = corpus.labels("language")
    languages = [names[code] for code in np.flatnonzero(np.bincount(codes[chain.kept], minlength=len(names)))]
    known = [language for language in languages if 2 <= len(language) <= 3]
    write_atomic(home / "README.md", card(folder.name.lstrip("."), schema, counts, chain.steps, known).encode())
