"""The documents table beside packed tokens: columns and texts in the order of the packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.errors import ArtifactError, MissingExtra, SpecError, did_you_mean
from hone.base.lazy import lazy

pa = lazy("pyarrow")
compute = lazy("pyarrow.compute")
parquet = lazy("pyarrow.parquet")


def columns_of(folder: Path, split: str, names: Sequence[str], num_documents: int) -> dict[str, np.ndarray]:
    """Columns `names` of the documents of `split`, each [num_documents]; text columns as object arrays of str.

    Raises SpecError for an unknown column, ArtifactError when there is no table or it has other documents.
    """
    parts = [_chosen(path, split, names) for path in _files(folder)]
    table = pa.concat_tables(parts)
    if len(table) != num_documents:
        raise ArtifactError(
            f"{folder / 'documents'} has {len(table)} documents of split '{split}', but tokens/ has {num_documents}",
            fix="delete the folder and run its data stage again",
        )
    return {name: table.column(name).to_numpy() for name in names}


def texts_of(folder: Path, split: str, places: np.ndarray) -> list[str]:
    """The texts of the documents with indices `places` (int64, ascending) among those of `split`."""
    found: list[str] = []
    first = 0
    for path in _files(folder):
        size = len(_chosen(path, split, ()))
        here = places[(places >= first) & (places < first + size)] - first
        if len(here):
            found += _chosen(path, split, ("text",)).column("text").take(pa.array(here)).to_pylist()
        first += size
    return found


def named(values: np.ndarray, option: str) -> tuple[list[str], np.ndarray]:
    """(sorted names, each document's index among them, int64) of a column. Raises SpecError for fractions; `option`
    is the field that names the column."""
    if np.issubdtype(values.dtype, np.floating):
        raise SpecError(f"{option} is a column of fractions, not of names", fix="take one such as group or language")
    names, codes = np.unique(values.astype(str), return_inverse=True)
    return names.tolist(), codes


def _files(folder: Path) -> list[Path]:
    """The shards of the table, in order."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra.of("reading the documents of a data artifact", "pyarrow", "data") from None
    paths = sorted((folder / "documents").glob("*.parquet"))
    if not paths:
        raise ArtifactError(
            f"{folder} has no documents/*.parquet, the table of the packed documents",
            fix="take a folder that a data stage of hone made",
        )
    return paths


def _chosen(path: Path, split: str, names: Sequence[str]) -> Any:
    """The rows of one shard that belong to `split`, with the columns `names` and 'split'."""
    known = parquet.read_schema(path).names
    for name in names:
        if name not in known:
            kept = ", ".join(column for column in known if column != "text")
            hint = did_you_mean(name, known)
            raise SpecError(f"{path.parent} has no column '{name}'", fix=f"{hint}its columns: {kept}")
    table = parquet.read_table(path, columns=[*dict.fromkeys([*names, "split"])])
    return table.filter(compute.equal(table.column("split"), split))
