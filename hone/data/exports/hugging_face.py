"""A Hugging Face data set of the kept documents: Parquet files by split and a card with their features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hone.base.lazy import lazy

pa = lazy("pyarrow")
compute = lazy("pyarrow.compute")
parquet = lazy("pyarrow.parquet")

SPLITS = {"train": "train", "val": "validation"}
"""Names of the splits there."""
_KINDS = {"double": "float64", "float": "float32", "halffloat": "float16", "bool": "bool"}


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
