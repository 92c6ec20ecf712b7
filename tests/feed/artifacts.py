"""Small data folders written by hand: packed tokens with a documents table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

EOS = 0


def write_artifact(folder: Path, documents: list[list[int]], columns: dict[str, list[Any]], shards: int = 2) -> Path:
    """A data folder with `documents` (token ids, closed here by EOS) in train, one column entry a document."""
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    (folder / "documents").mkdir(exist_ok=True)
    closed = [[*document, EOS] for document in documents]
    flat = np.array([token for document in closed for token in document], "<u2")
    held_out = np.array([1, 2, EOS] * shards, "<u2")
    splits = {}
    for split, tokens, starts in (
        ("train", flat, np.cumsum([0, *map(len, closed)])),
        ("val", held_out, np.arange(shards + 1) * 3),
    ):
        tokens.tofile(folder / "tokens" / f"{split}.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", starts.astype(np.int64))
        splits[split] = {"tokens": len(tokens), "documents": len(starts) - 1, "bytes": len(tokens)}
    meta = {"dtype": "uint16", "vocab_size": 60000, "eos_token_id": EOS, "splits": splits}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    rows = {
        "text": [" ".join(map(str, document)) for document in documents],
        "bytes": [len(document) for document in documents],
        "split": ["train"] * len(documents),
        **columns,
    }
    # Documents of another split stand between, as in a real folder.
    for number, places in enumerate(np.array_split(np.arange(len(documents)), shards)):
        chosen = {name: [values[place] for place in places] for name, values in rows.items()}
        for name, values in chosen.items():
            values.insert(len(values) // 2, "val" if name == "split" else (values or rows[name])[0])
        parquet.write_table(pa.table(chosen), folder / "documents" / f"{number:05d}.parquet")
    return folder


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents of these sizes in which every token id occurs once."""
    numbers = iter(range(1, 60000))
    return [[next(numbers) for _ in range(size)] for size in sizes]
