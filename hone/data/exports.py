"""Exports: the result in other forms: dropped documents in full, JSONL, a Hugging Face data set; a file a shard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import compute, parquet

from hone.base.durable import write_atomic
from hone.base.errors import MissingExtra
from hone.data.chain import Chain
from hone.data.corpus import Columns, Part
from hone.data.dedup.groups import COLUMNS, Named
from hone.data.edits.cuts import Cuts
from hone.data.executors.task import Task
from hone.data.expression import columns_of, evaluate
from hone.data.filters.base import Filter
from hone.data.filters.decide import causes as causes_of
from hone.data.settings import Exports
from hone.data.work import Work

_ROWS = 512
_SHOWN = ("id", "source", "url", "metadata", "text")
SPLITS = {"train": "train", "val": "validation"}
"""Names of the splits in a Hugging Face data set."""
_KINDS = {"double": "float64", "float": "float32", "halffloat": "float16", "bool": "bool"}
LINES = ".jsonl.zst"


def export(spec: Exports, splits: Mapping[str, np.ndarray], chain: Chain, clusters: Named | None, work: Work) -> None:
    """Writes the requested forms into the result's folder, whose documents/ is complete."""
    parts = {f"{part.number:05d}": part for part in chain.corpus.parts()}
    documents = sorted((work.folder / "documents").glob("*.parquet"))
    if spec.jsonl:
        state = work.state("jsonl")
        lines = [Task.of(path.stem, state, {"documents": path, "name": f"{path.stem}{LINES}"}) for path in documents]
        work.write("jsonl", kept_lines, lines, LINES)
    if spec.hugging_face:
        state, by_split, tasks = work.state("hugging_face/data"), {}, []
        for split, members in splits.items():
            by_split[split] = [path for path in documents if members[parts[path.stem].here].any()]
            for path in by_split[split]:
                name = f"{SPLITS[split]}-{path.stem}"
                given = {"documents": path, "split": split, "name": f"{name}.parquet"}
                tasks.append(Task.of(name, state, given))
        work.write("hugging_face/data", write_split, tasks)
        _write_card(by_split, chain, work.folder)
    if spec.dropped:
        state, told = work.state("dropped"), {"causes": tuple(chain.causes), "filters": tuple(chain.spec.filters)}
        tasks = []
        for name, part in parts.items():
            gone, near = chain.dropped_by[part.here], clusters and clusters.at(part.here)
            if gone.any():
                bare = part._replace(cuts=Cuts.none())  # the texts as they were read
                tasks.append(Task.of(name, state, {"part": bare, "dropped_by": gone, **told, "clusters": near}))
        work.write("dropped", dropped_lines, tasks, LINES)


def _write_card(by_split: Mapping[str, list[Path]], chain: Chain, folder: Path) -> None:
    home = folder / "hugging_face"
    counts: dict[str, tuple[int, int]] = {}
    schema: Any = None
    for split, paths in by_split.items():
        metadata = [parquet.read_metadata(home / "data" / f"{SPLITS[split]}-{path.stem}.parquet") for path in paths]
        if metadata:
            sizes = sum(one.row_group(group).total_byte_size for one in metadata for group in range(one.num_row_groups))
            counts[split] = (sum(one.num_rows for one in metadata), sizes)
            schema = metadata[0].schema.to_arrow_schema()
    names, codes = chain.corpus.labels("language")
    languages = [names[code] for code in np.flatnonzero(np.bincount(codes[chain.kept], minlength=len(names)))]
    known = [language for language in languages if 2 <= len(language) <= 3]
    write_atomic(home / "README.md", card(folder.name.lstrip("."), schema, counts, chain.steps, known).encode())


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes `rows` as JSON lines compressed by zstd; returns their number. Numbers that JSON has not (NaN) are null."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.of("writing .jsonl.zst", "zstandard", "data") from None
    count = 0
    with open(path, "wb") as raw, zstandard.ZstdCompressor(level=3).stream_writer(raw) as file:
        for row in rows:
            file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            count += 1
    return count


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as JSON: metadata as an object, NaN and infinity as null."""
    made = {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in row.items()}
    if "metadata" in made:
        made["metadata"] = json.loads(made["metadata"]) if made["metadata"] else {}
    return made


def kept_lines(folder: Path, documents: Path, name: str) -> dict[str, Any]:
    """A task: writes a file of kept documents as JSON lines into `folder`/`name`."""
    with parquet.ParquetFile(documents) as file:
        batches = file.iter_batches(batch_size=_ROWS)
        return {"rows": write_lines(folder / name, (row for batch in batches for row in batch.to_pylist()))}


def dropped_lines(
    folder: Path,
    part: Part,
    dropped_by: np.ndarray,
    causes: tuple[tuple[str, str], ...],
    filters: tuple[Filter, ...],
    clusters: Named | None,
) -> dict[str, Any]:
    """A task: writes the dropped documents of one shard; `dropped_by` (uint16 [its documents]) as in `write.write_signals`.

    A row: id, source, url, metadata, step, reason, `rule` (the expression that was not met) and `value` (of each of its
    columns), both null for steps without rules, the cluster of a duplicate, and the text before any cut.
    """
    told = told_rules(filters, Columns([part.shard], parquet.read_schema(part.shard).names, compact=False), dropped_by)

    def rows() -> Iterable[dict[str, Any]]:
        done = 0
        with parquet.ParquetFile(part.shard) as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(_SHOWN)):
                gone = np.flatnonzero(dropped_by[done : done + len(batch)])
                for place, row in zip(gone.tolist(), batch.take(gone).to_pylist() if len(gone) else ()):
                    index = done + place
                    step, reason = causes[dropped_by[index] - 1]
                    rule, value = told.get(index, (None, None))
                    why = {"step": step, "reason": reason, "rule": rule, "value": value}
                    if clusters is not None and clusters.sizes[index]:
                        why |= dict(zip(COLUMNS, (clusters.ids[index].decode(), int(clusters.sizes[index]))))
                    text = row.pop("text")
                    yield {**row, **why, "text": text}
                done += len(batch)

    return {"rows": write_lines(folder / f"{part.number:05d}.jsonl.zst", rows())}


def told_rules(
    filters: Sequence[Filter], columns: Columns, dropped_by: np.ndarray
) -> dict[int, tuple[str, dict[str, Any]]]:
    """{document: (expression, {column: value})} of the rule that dropped each document that a filter dropped."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for number, (place, reason) in enumerate(causes_of(filters)):
        gone = dropped_by == number + 1
        if not gone.any():
            continue
        for rule in filters[place].rules():
            if rule.reason != reason:
                continue
            names = sorted(columns_of(rule.keep))
            for index in np.flatnonzero(gone & ~evaluate(rule.keep, columns)).tolist():
                if index not in found:
                    values = {name: columns[name][index] for name in names}
                    found[index] = (
                        rule.keep,
                        {name: _number(value) for name, value in values.items()},
                    )
    return found


def _number(value: Any) -> Any:
    """A numpy value as a Python one; NaN is None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value


def write_split(folder: Path, documents: Path, split: str, name: str) -> dict[str, Any]:
    """A task: writes the documents of one split of a file of kept documents into `folder`/`name`, without the column of the split."""
    with parquet.ParquetFile(documents) as file:
        place = file.schema_arrow.names.index("split")
        schema = file.schema_arrow.remove(place)
        told = {"info": {"features": features(schema)}}
        schema = schema.with_metadata({"huggingface": json.dumps(told)})
        count = size = 0
        with parquet.ParquetWriter(folder / name, schema, compression="zstd") as writer:
            for batch in file.iter_batches(batch_size=2048):
                table = pa.Table.from_batches([batch])
                chosen = table.filter(compute.equal(table.column("split"), split)).remove_column(place)
                writer.write_table(chosen.cast(schema))
                count += len(chosen)
                size += chosen.nbytes
    return {"rows": count, "bytes": size}


def features(schema: Any) -> dict[str, dict[str, str]]:
    """The features of a data set with this Arrow schema, as the library datasets writes them."""
    return {field.name: {"dtype": _KINDS.get(str(field.type), str(field.type)), "_type": "Value"} for field in schema}


def card(
    title: str,
    schema: Any,
    splits: Mapping[str, tuple[int, int]],
    steps: Sequence[dict[str, Any]],
    languages: Sequence[str],
) -> str:
    """The text of README.md: its header says how to load the folder. `splits` are (documents, bytes) of each that has files."""
    head = {
        "language": list(languages),
        "task_categories": ["text-generation"],
        "size_categories": [_size(sum(rows for rows, _ in splits.values()))],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": SPLITS[split], "path": f"data/{SPLITS[split]}-*.parquet"} for split in splits],
            }
        ],
        "dataset_info": {
            "features": [{"name": name, "dtype": row["dtype"]} for name, row in features(schema).items()],
            "splits": [
                {"name": SPLITS[split], "num_examples": rows, "num_bytes": size}
                for split, (rows, size) in splits.items()
            ],
            "dataset_size": sum(size for _, size in splits.values()),
        },
    }
    if not languages:
        del head["language"]
    table = [
        f"| {row['name']} | {row['slot']} | {row['documents_in']:,} | {row['documents_out']:,} | {row['bytes_out']:,} |"
        for row in steps
    ]
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(),
            "---",
            f"# {title}",
            "",
            "Text curated with hone. Its columns are the document, its source and the signals by which it was kept.",
            "The texts have the licences of their sources, which are not recorded here.",
            "",
            "| step | slot | documents in | documents out | bytes out |",
            "|---|---|---|---|---|",
            *table,
            "",
            "```python",
            "from datasets import load_dataset",
            "",
            'data = load_dataset("FOLDER")  # this folder, or its name on the hub',
            "```",
            "",
        ]
    )


def _size(count: int) -> str:
    """The hub's name for the number of rows."""
    borders = [10**power for power in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)]
    names = ["n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B"]
    names += ["10B<n<100B", "100B<n<1T", "n>1T"]
    return names[int(np.searchsorted(borders, count, "right"))]
