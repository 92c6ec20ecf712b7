"""Apply: asks about the documents of a corpus, in the order of its shards, and writes shards with the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hone.data.corpus import Corpus, Part
from hone.data.executors.task import Task, finished, perform
from hone.data.expression import evaluate
from hone.data.llm.base import Answer, Asked, Asking, need_few
from hone.data.llm.techniques import LLMColumns


class Applied(NamedTuple):
    """A corpus with the answers, which of its documents stay (bool [num_documents]), and counts for stats.json."""

    corpus: Corpus
    kept: np.ndarray
    figures: dict[str, Any]


def apply(
    spec: Any, corpus: Corpus, kept: np.ndarray, state: Path, journal: Path, advance: Callable[[int], None]
) -> Applied:
    """Asks about every document where `kept`; `journal` is the file of paid answers, `advance` is told how many are done.

    A shard that is finished is not read again, and a question with an answer in the journal is not asked again. Questions
    of the next shards are asked while the last answers of one are still missing.
    """
    asked = Asked(spec, journal)
    sizes = zip(corpus.parts(), corpus.sizes, strict=True)
    shards = [_Shard.of(spec, part, kept[part.first : part.first + size], state) for part, size in sizes]
    try:
        for (number, index), answer in asked.answers(_stream(spec, shards)):
            shards[number].take(spec, index, answer)
            advance(1)
            for one in shards:
                if one.complete:
                    one.write(spec)
        for one in shards:
            if one.summary is None:
                one.write(spec)
        failed, total = (sum(one.summary[name] for one in shards if one.summary) for name in ("failed", "asked"))
        example = next((one.refused for one in shards if one.refused), "")
        need_few(spec, failed, total, example or "an answer shorter than min_share of the document")
        made = Corpus([state / one.part.shard.name for one in shards])
        stays = kept
        if spec.keep:
            answered = np.concatenate([np.load(state / f"{one.part.shard.stem}.npy") for one in shards])
            stays = kept & (evaluate(spec.keep, made.columns) | ~answered)
        return Applied(made, stays, {"asked": total, **asked.figures(failed)})
    finally:
        asked.journal.close()


@dataclass
class _Shard:
    """A shard and the answers about its documents so far."""

    part: Part
    chosen: np.ndarray
    task: Task
    summary: dict[str, Any] | None
    """What its task returned, once it is written."""
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    refused: str = ""
    """The first answer that had no values."""
    num_missing: int = 0
    read: bool = False
    """Whether all of its questions have been given out."""

    @classmethod
    def of(cls, spec: Asking, part: Part, chosen: np.ndarray, state: Path) -> _Shard:
        """Of the documents where `chosen` (bool [documents of the shard])."""
        task = Task.of(part.shard.stem, state, {"spec": spec, "part": part, "chosen": chosen})
        return cls(part, chosen, task, finished(rewrite, task))

    @property
    def complete(self) -> bool:
        """Whether all answers are there, and it is not written."""
        return self.summary is None and self.read and self.num_missing == 0

    def take(self, spec: Asking, index: int, answer: Answer) -> None:
        """Keeps the answer about document `index`."""
        self.num_missing -= 1
        values = spec.values_of(answer)
        if values is None:
            self.refused = self.refused or answer.refused or answer.text
        else:
            self.values[index] = values

    def write(self, spec: Asking) -> None:
        """Writes the shard with the answers."""
        self.summary = perform(rewrite, self.task.given(values=self.values))
        self.values = {}


def _stream(spec: Asking, shards: list[_Shard]) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """((shard, number in it), request) of every document that is asked about, of all shards that are not finished."""
    for number, one in enumerate(shards):
        if one.summary is None:
            for index, request in _requests(spec, one.part, one.chosen):
                one.num_missing += 1
                yield (number, index), request
            one.read = True


def _requests(spec: Asking, part: Part, chosen: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the shard, request) of every document that is asked about."""
    with parquet.ParquetFile(part.shard) as file:
        done = 0
        for batch in file.iter_batches(
            batch_size=256, columns=["text", "id", "source", "group", "kind", "url", "language"]
        ):
            here = np.flatnonzero(chosen[done : done + len(batch)])
            for place, row in zip(here.tolist(), batch.take(here).to_pylist() if len(here) else ()):
                if spec.asks(len(row["text"].encode())):
                    yield done + place, spec.request(row)
            done += len(batch)


def rewrite(
    folder: Path, spec: Any, part: Part, values: dict[int, dict[str, Any]], chosen: np.ndarray
) -> dict[str, Any]:
    """A task: writes a shard with the columns or the texts of the answers `values` (by number in the shard), and which were answered."""
    types = {name: pa.type_for_alias(kind) for name, kind in spec.types().items()}
    replaces = not isinstance(spec, LLMColumns)
    answered = np.zeros(len(chosen), bool)
    num_asked = done = 0
    with parquet.ParquetFile(part.shard) as file:
        schema = pa.schema([*file.schema_arrow, *types.items()])
        with parquet.ParquetWriter(folder / part.shard.name, schema, compression="zstd") as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                span = range(done, done + len(table))
                done += len(table)
                texts = table.column("text").to_pylist()
                for place, number in enumerate(span):
                    asks = chosen[number] and spec.asks(len(texts[place].encode()))
                    num_asked += asks
                    there = values.get(number)
                    if there is None:
                        continue
                    if replaces and len(there["text"]) < spec.min_share * len(texts[place]):
                        continue
                    answered[number] = True
                    if replaces:
                        texts[place] = there["text"]
                if replaces:
                    sizes = pa.array([len(text.encode()) for text in texts], schema.field("bytes").type)
                    for name, column in (("text", pa.array(texts, schema.field("text").type)), ("bytes", sizes)):
                        table = table.set_column(schema.get_field_index(name), name, column)
                    columns = {"rephrased": answered[span.start : span.stop]}
                else:
                    columns = {name: [values.get(number, {}).get(name) for number in span] for name in types}
                for name, kind in types.items():
                    table = table.append_column(name, pa.array(columns[name], kind))
                writer.write_table(table.cast(schema))
    np.save(folder / f"{part.shard.stem}.npy", answered)
    return {"rows": len(chosen), "asked": int(num_asked), "failed": int(num_asked - answered.sum())}
